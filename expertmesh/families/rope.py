"""Rotary embeddings of a config, in both spellings.

Files before transformers 5 have `rope_theta` and `rope_scaling`; later ones `rope_parameters`,
which may hold an object for each type of layer. Where both are given, an old `rope_scaling` wins,
and a theta inside wins over one outside, as in transformers.
"""

from __future__ import annotations

import math

from expertmesh.families.config_reader import ConfigReader
from expertmesh.model_config import RopeConfig

MAX_POSITIONS = 1 << 27
KINDS = ("default", "linear", "llama3", "yarn")

_ORIGINAL = "original_max_position_embeddings"
_LAYER_TYPES = ("full_attention", "sliding_attention")


def parse_rope(
    reader: ConfigReader, dim: int, default_theta: float = 1e4, *, interleaved: bool = False
) -> RopeConfig:
    """The one rope of a model, over whole heads of `dim`."""
    section = rope_section(reader)
    for key, value in section.raw.items():
        if isinstance(value, dict):
            section.fail(key, "no rope of its own for a type of layers", fix="not supported")
    theta = reader.number("rope_theta", 1.0, 1e12, default_theta)
    return parse_section(reader, section, dim, theta, interleaved=interleaved)


def rope_section(reader: ConfigReader) -> ConfigReader:
    """The object with the scaling of a rope, perhaps empty."""
    for key in ("rope_scaling", "rope_parameters"):
        found = reader.child(key)
        if found is not None and found.raw:
            return found
    return ConfigReader(reader.path, {}, "rope_parameters.")


def rope_of_layer_type(reader: ConfigReader, layer_type: str) -> ConfigReader:
    """The object of `rope_parameters` for a type of layers, perhaps empty."""
    found = reader.child("rope_parameters")
    if found is None:
        return ConfigReader(reader.path, {}, f"rope_parameters.{layer_type}.")
    for key in found.raw:
        if key not in _LAYER_TYPES:
            found.fail(key, f"nothing but {' and '.join(_LAYER_TYPES)}")
    return found.child(layer_type) or ConfigReader(reader.path, {}, f"{found.prefix}{layer_type}.")


def parse_section(
    reader: ConfigReader,
    section: ConfigReader,
    dim: int,
    theta: float,
    *,
    interleaved: bool = False,
    partial: bool = False,
) -> RopeConfig:
    """A rope from the object that describes its scaling.

    Args:
        reader: The whole config.
        section: The object.
        dim: Dimensions that are rotated.
        theta: Base where the object has none.
        interleaved: Which dimensions are pairs.
        partial: Whether `dim` takes account of `partial_rotary_factor` already.
    """
    if not partial:
        check_full_rotation(reader, section)
    section.refuse("mrope_section")
    key = "rope_type" if section.get("rope_type") is not None else "type"
    kind = section.choice(key, KINDS, "default")
    base = RopeConfig(section.number("rope_theta", 1.0, 1e12, theta), dim, interleaved=interleaved)
    match kind:
        case "linear":
            return RopeConfig(base.theta, dim, "linear", _factor(section), interleaved=interleaved)
        case "llama3":
            return _llama3(reader, section, base)
        case "yarn":
            return _yarn(reader, section, base)
    return base


def check_full_rotation(*readers: ConfigReader) -> None:
    """Refuses heads that are rotated in part."""
    for reader in readers:
        if reader.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
            reader.fail("partial_rotary_factor", "1 (rotation of the whole head)")


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """How much larger attention scores become when the context grows (YaRN, section 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _factor(section: ConfigReader) -> float:
    return section.number("factor", 1e-3, 1e6)


def _llama3(reader: ConfigReader, section: ConfigReader, base: RopeConfig) -> RopeConfig:
    low = section.number("low_freq_factor", 1e-3, 1e6)
    high = section.number("high_freq_factor", 1e-3, 1e6)
    if high <= low:
        section.fail("high_freq_factor", f"more than low_freq_factor={low:g}")
    return RopeConfig(
        base.theta,
        base.dim,
        "llama3",
        _factor(section),
        low,
        high,
        _original_positions(reader, section),
        interleaved=base.interleaved,
    )


def _yarn(reader: ConfigReader, section: ConfigReader, base: RopeConfig) -> RopeConfig:
    factor = _factor(section)
    # Zero and null mean the default here, as in transformers.
    fast = section.number("beta_fast", 0.0, 1e6, 0.0) or 32.0
    slow = section.number("beta_slow", 0.0, 1e6, 0.0) or 1.0
    if fast < slow:
        section.fail("beta_fast", f"beta_slow={slow:g} (a step instead of a ramp) or more")
    if base.theta <= 1.0:
        section.fail("rope_theta", "more than 1")
    return RopeConfig(
        base.theta,
        base.dim,
        "yarn",
        factor,
        original_max_position=_original_positions(reader, section),
        interleaved=base.interleaved,
        beta_fast=fast,
        beta_slow=slow,
        truncate=section.boolean("truncate", True),
        attention_factor=_attention_factor(section, factor),
    )


def _attention_factor(section: ConfigReader, factor: float) -> float:
    given = section.optional_number("attention_factor", 1e-3, 1e3)
    if given is not None:
        return given
    mscale = section.number("mscale", 0.0, 1e3, 0.0)
    all_dims = section.number("mscale_all_dim", 0.0, 1e3, 0.0)
    if mscale and all_dims:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dims)
    return yarn_mscale(factor)


def _original_positions(reader: ConfigReader, section: ConfigReader) -> int:
    """Context before it was extended; transformers takes a value outside of the object first."""
    inside = section.optional_integer(_ORIGINAL, 1, MAX_POSITIONS)
    outside = reader.optional_integer(_ORIGINAL, 1, MAX_POSITIONS)
    if inside is not None and outside is not None and inside != outside:
        reader.fail(_ORIGINAL, f"{inside} as {section.prefix}{_ORIGINAL} says")
    return outside or inside or reader.integer("max_position_embeddings", 1, MAX_POSITIONS)
