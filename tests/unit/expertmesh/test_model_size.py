"""Numbers of weights, against the modules of transformers and against published figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from expertmesh.families import FAMILIES, load_model_config
from expertmesh.model_config import (
    GateConfig,
    GqaConfig,
    LayerConfig,
    ModelConfig,
    MoeFfnConfig,
    NormConfig,
    RopeConfig,
)
from expertmesh.model_tools.inspect import inspect_model
from expertmesh.model_tools.model_size import Weights, model_size
from tests.support.hub_families import hub_config, save_config, tiny_json
from tests.support.published_models import CONFIGS, PUBLISHED, PublishedModel

ROPE = RopeConfig(1e4, 8)
GQA = GqaConfig(num_heads=6, num_kv_heads=2, head_dim=8, rope=ROPE, scale=1.0)

LARGEST = {
    model.config["model_type"]: model.name
    for model in sorted(PUBLISHED, key=lambda model: model.total_b)
}.values()
"""One model of each family."""


def parameters_of_transformers(config: PretrainedConfig) -> int:
    """Weights of the real module, and selection biases, which are buffers there."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    biases = (data for name, data in module.named_buffers() if "score_correction_bias" in name)
    return sum(data.numel() for data in (*module.parameters(), *biases))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_weights_of_tiny_models(model_type: str, tmp_path: Path) -> None:
    """Layers of every kind that a family has."""
    raw = tiny_json(model_type)
    size = model_size(load_model_config(save_config(tmp_path / "ours", raw)))
    assert size.total == parameters_of_transformers(hub_config(tmp_path / "hub", raw))


def test_every_family_has_a_published_model() -> None:
    """Against whose figures it is held."""
    assert {model.config["model_type"] for model in PUBLISHED} == set(FAMILIES)
    assert {model.name for model in PUBLISHED} == set(CONFIGS)


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda model: model.name)
def test_sizes_of_published_models(published: PublishedModel, tmp_path: Path) -> None:
    """From `config.json` alone, with all keys that it has: the numbers on the model's card."""
    size = inspect_model(save_config(tmp_path, published.config)).facts.size
    assert size.total / 1e9 == pytest.approx(published.total_b, rel=0.01)
    if published.active_b is not None:
        embedding = 0 if published.active_has_embedding else size.embedding.count
        assert (size.active - embedding) / 1e9 == pytest.approx(published.active_b, rel=0.03)


@pytest.mark.parametrize("name", LARGEST)
def test_sizes_are_those_of_the_real_module(name: str, tmp_path: Path) -> None:
    """To the last weight, of the largest model of each family."""
    raw = CONFIGS[name] | {"quantization_config": None}
    size = model_size(load_model_config(save_config(tmp_path / "ours", raw)))
    assert size.total == parameters_of_transformers(hub_config(tmp_path / "hub", raw))


def test_weights_are_counted_by_type() -> None:
    """Norms, gates and the like are FP32 whatever is served."""
    assert Weights(plain=10, exact=3).nbytes(2) == 32
    gate = GateConfig(5, 2, bias=True, selection_bias=True)
    layers = (LayerConfig(GQA, MoeFfnConfig(gate, 24)),)
    config = ModelConfig("gpt_oss", 96, 36, layers, NormConfig(1e-6), 64, False, "float32")
    (layer,) = model_size(config).layers
    assert layer.resident.exact == (5 * 36 + 5 + 5) + 2 * 36
    assert layer.resident.plain == 36 * (48 + 16 + 16 + 48)
    assert layer.expert == Weights(plain=3 * 36 * 24)
    assert layer.experts == layer.expert * 5
    assert layer.chosen == layer.expert * 2
