"""Tiny models of every family as transformers makes them, from the same configs as ours."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from expertmesh.families import FAMILIES
from expertmesh.families.config_reader import Json
from expertmesh.model_tools.make_tiny import tiny_config_json

MODEL_TYPES = tuple(FAMILIES)
_TRANSFORMERS_TYPES = {"kimi_k2": "deepseek_v3"}
"""Families that transformers knows under another name."""


def transformers_type(model_type: str) -> str:
    """The name of a family in transformers."""
    return _TRANSFORMERS_TYPES.get(model_type, model_type)


def tiny_json(model_type: str, **changes: object) -> Json:
    """`config.json` of a family's tiny model, changed; `...` takes a key away."""
    raw = tiny_config_json(FAMILIES[model_type]) | changes
    return {key: value for key, value in raw.items() if value is not ...}


def save_config(folder: Path, raw: Json) -> Path:
    """Writes `config.json` into a folder, and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def hub_config(folder: Path, raw: Json) -> PretrainedConfig:
    """The config as transformers reads it from a file."""
    changed = raw | {"model_type": transformers_type(str(raw["model_type"]))}
    return AutoConfig.from_pretrained(save_config(folder, changed))


def hub_model(folder: Path, raw: Json) -> PreTrainedModel:
    """A model of transformers with random weights, experts with biases and sinks among them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hub_config(folder, raw), dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.normal_()
    return model.eval()


def save_hub_model(folder: Path, raw: Json, *, stacked: bool = False) -> PreTrainedModel:
    """Saves such a model as a checkpoint of its family; `stacked` as transformers holds experts."""
    model = hub_model(folder / "config", raw)
    model.save_pretrained(folder, save_original_format=not stacked)
    saved: dict[str, object] = json.loads((folder / "config.json").read_text())
    save_config(folder, saved | {"model_type": raw["model_type"]})
    return model
