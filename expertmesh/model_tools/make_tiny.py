"""Writes a small random checkpoint of any family: to try a server, a client or a format with.

The names of tensors are those of files on the hub, the config is the family's `tiny`. Weights are
drawn wide, so that logits are peaked: greedy choices have margins far above rounding, and a wrong
expert, row or position changes tokens. The same seed gives the same bits everywhere.
"""

from __future__ import annotations

import math
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from expertmesh.errors import CheckpointError, SettingsError
from expertmesh.families import FAMILIES, Family, ParameterRule, WeightRule, load_model_config
from expertmesh.families.config_reader import Json
from expertmesh.formats.codec import PartData
from expertmesh.host_tensor import Float32
from expertmesh.model_config import DtypeName, ModelConfig
from expertmesh.model_tools.config_json import encode
from expertmesh.model_tools.numbers import from_float32, normal
from expertmesh.model_tools.quantize import QUANTIZATIONS, quantize_model, safetensors_bytes
from expertmesh.safetensors_file import DTYPE_NAMES
from expertmesh.shards import SINGLE_FILE

_GAIN = 1.5
"""Standard deviation of the outputs of a matrix, for inputs of one."""
_OUTPUT_GAIN = 4.0
"""The same of logits."""
_TIED_GAIN = 0.5
"""The same of embeddings that are the output matrix too: else each token predicts itself."""
_NORM_SPREAD = 0.2
_BIAS_SPREAD = 0.5
_SPREADS = {"selection_bias": 0.2, "sinks": 1.0}
_KEPT_IN_FP32 = ("selection_bias",)
"""Parameters that files keep in float32 whatever the type of the others is."""
_CODES = {name: code for code, name in DTYPE_NAMES.items()}


def make_tiny(
    model_type: str,
    out_dir: Path,
    *,
    seed: int = 0,
    dtype: DtypeName = "float32",
    quantization: str | None = None,
) -> None:
    """Writes a checkpoint.

    Args:
        model_type: A family.
        out_dir: New folder.
        seed: Of the weights.
        dtype: Of the weights.
        quantization: One of `QUANTIZATIONS`, or None.

    Raises:
        SettingsError: there is no such family or quantisation, no weight of the family is stored
            so, or the folder exists.
    """
    family = FAMILIES.get(model_type)
    if family is None:
        raise SettingsError(f"family {model_type!r}: expected one of {', '.join(sorted(FAMILIES))}")
    if quantization is not None and quantization not in QUANTIZATIONS:
        known = ", ".join(QUANTIZATIONS)
        raise SettingsError(f"format {quantization!r}: expected plain or one of {known}")
    if out_dir.exists():
        raise SettingsError(f"{out_dir}: exists", fix="remove it or choose another folder")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tiny-", dir=out_dir.parent) as scratch:
        made = Path(scratch) / "plain"
        write_tiny(family, made, seed, dtype)
        if quantization is not None:
            plain, made = made, Path(scratch) / quantization
            try:
                quantize_model(plain, made, QUANTIZATIONS[quantization])
            except CheckpointError as error:
                raise SettingsError(
                    f"format {quantization!r}: not a format of the family {model_type}",
                    fix="choose another format",
                ) from error
        made.rename(out_dir)


def write_tiny(family: Family, folder: Path, seed: int, dtype: DtypeName) -> ModelConfig:
    """Makes a folder with config.json and the weights."""
    folder.mkdir()
    (folder / "config.json").write_bytes(encode(tiny_config_json(family, dtype)))
    config = load_model_config(folder)
    tensors = {
        source.names[0]: _stored(_draw(rule, source, config, seed), _stored_dtype(rule.role, dtype))
        for rule, source in weight_rules(family, config)
    }
    with (folder / SINGLE_FILE).open("wb") as file:
        file.writelines(safetensors_bytes(tensors))
    return config


def tiny_config_json(family: Family, dtype: DtypeName = "float32") -> Json:
    """`config.json` of the family's tiny model."""
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.tiny,
        "dtype": dtype,
    }


def weight_rules(
    family: Family, config: ModelConfig, *, layout: int = 0
) -> Iterator[tuple[ParameterRule, WeightRule]]:
    """Every weight of a model, once, after the parameter that it is part of.

    Args:
        family: Of the model.
        config: Of the model.
        layout: Which of the family's layouts its experts have.
    """
    for rule in family.attention_rules(config):
        for source in rule.sources:
            yield rule, source
    for layer in config.moe_layers:
        experts = family.expert_rules(config, layer)
        chosen = experts.layouts[layout]
        for expert in range(1 if chosen.stacked else experts.num_experts):
            for rule in experts.parameters(chosen, expert):
                for source in rule.sources:
                    yield rule, source


def _draw(rule: ParameterRule, source: WeightRule, config: ModelConfig, seed: int) -> Float32:
    """Random weights by what they are for; each tensor has random numbers of its own."""
    values = normal(source.shape, seed, zlib.crc32(source.names[0].encode()))
    if rule.role.endswith("norm"):
        centre = _norm_centre(rule.role, config) - (1.0 if config.norm.unit_offset else 0.0)
        return values * np.float32(_NORM_SPREAD) + np.float32(centre)
    return values * np.float32(_spread(rule, config))


def _norm_centre(role: str, config: ModelConfig) -> float:
    """What norms multiply with, about. The last one makes up for a small tied embedding."""
    tied = role == "norm" and config.tie_word_embeddings
    return _OUTPUT_GAIN / _TIED_GAIN if tied else 1.0


def _spread(rule: ParameterRule, config: ModelConfig) -> float:
    if rule.role in _SPREADS:
        return _SPREADS[rule.role]
    if rule.role.endswith("bias"):
        return _BIAS_SPREAD
    gain = _GAIN
    if rule.role == "lm_head":
        gain = _OUTPUT_GAIN
    elif rule.role == "embed" and config.tie_word_embeddings:
        gain = _TIED_GAIN
    return gain / math.sqrt(rule.shape[-1])


def _stored_dtype(role: str, dtype: DtypeName) -> DtypeName:
    return "float32" if role in _KEPT_IN_FP32 else dtype


def _stored(values: Float32, dtype: DtypeName) -> PartData:
    return PartData(from_float32(values, dtype), _CODES[dtype])
