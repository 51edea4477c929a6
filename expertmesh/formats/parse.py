"""Reads `quantization_config` of `config.json`. What is not understood is refused by its key."""

from __future__ import annotations

from collections.abc import Callable, Set
from pathlib import Path

from expertmesh.families.config_reader import ConfigReader
from expertmesh.formats.fp8 import Fp8Blocks
from expertmesh.formats.modules import NameParts, check_pattern
from expertmesh.formats.parse_compressed import parse_compressed_tensors
from expertmesh.formats.quantization import Fp8, Mxfp4Experts, NotQuantized, Quantization
from expertmesh.formats.reading import MAX_BLOCK, names, refuse_unknown
from expertmesh.json_file import read_json_object

_KEYS = ("quantization_config", "compression_config")
_FIX = "use a checkpoint in one of these, or a plain one"


def read_quantization(path: Path) -> Quantization:
    """How the weights of a checkpoint are stored.

    Args:
        path: Its config.json.

    Raises:
        CheckpointError: as for `parse_quantization`.
    """
    return parse_quantization(ConfigReader(path, read_json_object(path)))


def parse_quantization(reader: ConfigReader) -> Quantization:
    """How the weights of a checkpoint are stored.

    Args:
        reader: The whole config.json.

    Raises:
        CheckpointError: one line naming file, key, value and what is supported.
    """
    present = [key for key in _KEYS if reader.raw.get(key) is not None]
    if not present:
        return NotQuantized()
    if len(present) == 2 and reader.raw[_KEYS[0]] != reader.raw[_KEYS[1]]:
        reader.fail(_KEYS[1], f"the same as {_KEYS[0]}", fix=f"remove {_KEYS[1]}")
    child = reader.child(present[0])
    assert child is not None
    method = child.text("quant_method")
    if method not in _PARSERS:
        child.fail("quant_method", f"one of {', '.join(sorted(_PARSERS))}", fix=_FIX)
    return _PARSERS[method](child)


def _parse_fp8(reader: ConfigReader) -> Fp8:
    refuse_unknown(
        reader,
        {
            "quant_method", "activation_scheme", "weight_block_size", "fmt", "scale_fmt",
            "expert_dtype", *_SKIP_LISTS, *_WITHOUT_EFFECT,
        },
    )  # fmt: skip
    reader.choice("activation_scheme", ("dynamic",), "dynamic")
    reader.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    reader.choice("expert_dtype", ("fp8",), "fp8")
    scale_format = reader.choice("scale_fmt", ("float", "ue8m0"), "float")
    rows, columns = _block(reader)
    skip_list, skipped = _skipped(reader, default=("lm_head",))
    codec = Fp8Blocks(rows, columns, byte_scales=scale_format == "ue8m0")
    return Fp8(reader.prefix.rstrip("."), skip_list, codec, skipped)


def _parse_mxfp4(reader: ConfigReader) -> Mxfp4Experts:
    refuse_unknown(reader, {"quant_method", *_SKIP_LISTS, *_WITHOUT_EFFECT})
    skip_list, skipped = _skipped(reader, default=())
    return Mxfp4Experts(reader.prefix.rstrip("."), skip_list, skipped)


_SKIP_LISTS = ("modules_to_not_convert", "ignored_layers")
_WITHOUT_EFFECT: Set[str] = {"dequantize"}
"""Keys that ask a loader for something and say nothing about what is stored."""


def _skipped(reader: ConfigReader, default: tuple[str, ...]) -> tuple[str, NameParts]:
    present = [key for key in _SKIP_LISTS if reader.raw.get(key) is not None]
    if len(present) == 2:
        reader.fail(_SKIP_LISTS[1], f"nothing beside {_SKIP_LISTS[0]}")
    if not present:
        return _SKIP_LISTS[0], NameParts(default)
    entries = names(reader, present[0])
    for entry in entries:
        expected = check_pattern(entry)
        if expected is not None:
            reader.fail(present[0], f"{expected}, not {entry[:60]!r}")
    return present[0], NameParts(entries)


def _block(reader: ConfigReader) -> tuple[int, int]:
    sizes = reader.integers("weight_block_size", 1, MAX_BLOCK)
    if len(sizes) != 2:
        reader.fail("weight_block_size", "two positive integers, rows and columns of a block")
    return sizes[0], sizes[1]


_PARSERS: dict[str, Callable[[ConfigReader], Quantization]] = {
    "compressed-tensors": parse_compressed_tensors,
    "fp8": _parse_fp8,
    "mxfp4": _parse_mxfp4,
}
