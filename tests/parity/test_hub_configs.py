"""Released models made small, with every key that their files have, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support import published_models
from tests.support.hub_configs import Config
from tests.support.hub_families import save_config, transformers_type
from tests.support.oracle import Oracle, prompts
from tests.support.parity import Traffic, compare, drive
from tests.support.runner_driver import make_runner
from tests.support.scaled_configs import VOCAB_SIZE, scaled_down
from tests.support.tiny_families import randomize

LENGTHS = (1, 9, 10, 11, 64, 100)


def _distinct() -> dict[str, Config]:
    """The configs that are not equal to one before them once they are small."""
    found: dict[str, Config] = {}
    for name, config in published_models.CONFIGS.items():
        small = scaled_down(config)
        if small not in found.values():
            found[name] = small
    return found


CONFIGS = _distinct()


@pytest.mark.parametrize("name", CONFIGS)
def test_models_of_the_hub_match_transformers(name: str, tmp_path: Path) -> None:
    """Logits and tokens past windows, blocks and the context before its rope was stretched."""
    oracle = _save(tmp_path, CONFIGS[name])
    runner = make_runner(tmp_path)
    requests = drive(runner, Traffic(48), prompts(VOCAB_SIZE, LENGTHS), 20)
    compare(requests, oracle).check()


def _save(folder: Path, config: Config) -> Oracle:
    """Writes the config as it is, with weights as transformers saves them."""
    known = config | {"model_type": transformers_type(config["model_type"])}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(save_config(folder / "as_known", known)),
        attn_implementation="eager",
        dtype=torch.float32,
    )
    # No wider, or seven layers would make more of rounding errors than the bound allows.
    randomize(model, config["hidden_size"] ** -0.5)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return Oracle.of(model)
