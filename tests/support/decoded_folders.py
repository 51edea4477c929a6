"""Quantised checkpoints as transformers reads them without their packages: plain, in FP32."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from expertmesh.checkpoint import Checkpoint, HostTensor
from expertmesh.families import FAMILIES, WeightRule
from expertmesh.host_tensor import to_float32
from tests.support.hub_families import transformers_type
from tests.support.parameters import parameters_of

Tensors = dict[str, npt.NDArray[np.float32]]


def save_decoded(folder: Path, source: Path) -> Path:
    """Writes what the weights of a checkpoint mean under their names on the hub.

    Not for families whose files stack or interleave experts.
    """
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    config["model_type"] = transformers_type(config["model_type"])
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_decoded(Checkpoint.open(source)), folder / "model.safetensors", {"format": "pt"})
    return folder


def _decoded(checkpoint: Checkpoint) -> Tensors:
    family, config = FAMILIES[checkpoint.config.family], checkpoint.config
    parameters = parameters_of(checkpoint)
    tensors: Tensors = {}
    for rule in family.attention_rules(config):
        tensors |= _split(parameters[rule.parameter], rule.sources)
    for layer in config.moe_layers:
        rules = family.expert_rules(config, layer)
        for expert in range(rules.num_experts):
            found = vars(checkpoint.read_expert(layer, expert))
            for rule in rules.parameters(rules.layouts[0], expert):
                tensors |= _split(found[rule.parameter.removeprefix("experts.")], rule.sources)
    return tensors


def _split(joined: HostTensor, sources: Sequence[WeightRule]) -> Tensors:
    """A parameter as the weights that it was joined of, one below the other."""
    values = to_float32(joined.data, joined.dtype)
    ends = np.cumsum([source.shape[0] for source in sources])
    parts = np.split(values, ends[:-1])
    return {source.names[0]: part for source, part in zip(sources, parts, strict=True)}
