"""Configs of released models as their files are, with every key, can be inspected."""

from __future__ import annotations

from pathlib import Path

import pytest

from expertmesh.model_tools.inspect import inspect_model
from tests.support.hub_configs import DENSE
from tests.support.hub_families import save_config
from tests.support.hub_latent_configs import LATENT
from tests.support.hub_moe_configs import MOE

BILLIONS = {
    "Llama-3.1-8B-Instruct": 8.03,
    "Llama-3.2-1B-Instruct": 1.24,
    "SmolLM2-135M-Instruct": 0.1345,
    "Mistral-7B-v0.1": 7.24,
    "Mistral-7B-Instruct-v0.3": 7.25,
    "Mistral-Nemo-Instruct-2407": 12.2,
    "Qwen2.5-7B-Instruct": 7.62,
    "Qwen2.5-72B-Instruct with YaRN": 72.7,
    "Qwen3-0.6B": 0.6,
    "Qwen3-32B": 32.8,
    "gemma-2-2b-it": 2.61,
    "gemma-2-9b": 9.24,
    "gemma-2-27b-it": 27.2,
    "gemma-3-270m-it": 0.268,
    "gemma-3-1b-it": 1.0,
    "Mixtral-8x7B-Instruct-v0.1": 46.7,
    "Mixtral-8x22B-Instruct-v0.1": 140.6,
    "Qwen1.5-MoE-A2.7B": 14.3,
    "Qwen2-57B-A14B-Instruct": 57.4,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-30B-A3B-FP8": 30.5,
    "Qwen3-235B-A22B": 235,
    "OLMoE-1B-7B-0924": 6.92,
    "DeepSeek-V2-Lite": 15.7,
    "DeepSeek-Coder-V2-Lite-Instruct": 15.7,
    "DeepSeek-V2": 236,
    "DeepSeek-V2.5": 236,
    "DeepSeek-V3": 671,
    "DeepSeek-V3.1": 671,
    "Moonlight-16B-A3B-Instruct": 16.0,
    "Kimi-K2-Instruct": 1026,
    "Kimi-K2-Thinking": 1026,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "MiMo-V2-Flash": 309,
}
"""Parameters, as published."""


@pytest.mark.parametrize(("name", "config"), (DENSE | MOE | LATENT).items(), ids=str)
def test_configs_as_released(name: str, config: dict[str, object], tmp_path: Path) -> None:
    """No key that such files have keeps the model from being read, and sizes are right."""
    found = inspect_model(save_config(tmp_path, config))
    assert found.facts.size.total / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)
