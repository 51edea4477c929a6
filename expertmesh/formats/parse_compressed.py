"""Reads the `quantization_config` of compressed-tensors."""

from __future__ import annotations

from expertmesh.families.config_reader import ConfigReader
from expertmesh.formats.codec import Codec
from expertmesh.formats.modules import LINEAR, REGEX, Targets, check_pattern
from expertmesh.formats.packed import PackedIntegers
from expertmesh.formats.quantization import CompressedTensors
from expertmesh.formats.reading import MAX_BLOCK, names, refuse_unknown
from expertmesh.formats.scaled import ScaledBytes
from expertmesh.formats.scaling import Scaling

PACKED, MIXED = "pack-quantized", "mixed-precision"
_STORAGE = {
    "int": (PACKED, "int-quantized", "naive-quantized"),
    "float": ("float-quantized", "naive-quantized"),
}
"""Type of weights to the formats that are read."""
_ALL_STORAGE = tuple(dict.fromkeys(name for names in _STORAGE.values() for name in names))
_STRATEGIES = {"int": ("tensor", "channel", "group"), "float": ("tensor", "channel", "block")}


def parse_compressed_tensors(reader: ConfigReader) -> CompressedTensors:
    """Groups of targets with their formats.

    Raises:
        CheckpointError: a key or value is not supported.
    """
    refuse_unknown(
        reader,
        {
            "config_groups", "format", "ignore", "quant_method", "quantization_status", "version",
            "global_compression_ratio", "sparsity_config", "run_compressed", "dequantize",
        },
    )  # fmt: skip
    _check_sparsity(reader)
    reader.choice("quantization_status", ("compressed", "frozen"), "compressed")
    default = reader.choice("format", (*_ALL_STORAGE, MIXED))
    formats = dict(
        pair for group in _groups(reader) for pair in _parse_group(group, default).items()
    )
    return CompressedTensors(
        reader.prefix.rstrip("."),
        "ignore",
        Targets(tuple(formats)),
        tuple(formats.items()),
        Targets(_patterns(reader, "ignore")),
    )


def _groups(reader: ConfigReader) -> list[ConfigReader]:
    groups = reader.child("config_groups")
    if groups is None or not groups.raw:
        reader.fail("config_groups", "at least one group")
    children = [groups.child(name) for name in groups.raw]
    return [child for child in children if child is not None]


def _parse_group(reader: ConfigReader, default_storage: str) -> dict[str, Codec | None]:
    refuse_unknown(reader, {"targets", "weights", "input_activations", "format"})
    targets = _patterns(reader, "targets")
    if not targets:
        reader.fail("targets", "at least one target")
    for target in targets:
        if not (target == LINEAR or target.startswith(REGEX) or target[:1].islower()):
            reader.fail("targets", f"'Linear', names or 're:' patterns, not {target[:60]!r}")
    _check_activations(reader)
    weights = reader.child("weights")
    storage = reader.choice("format", (*_ALL_STORAGE, MIXED), default_storage)
    if weights is None:
        return dict.fromkeys(targets)
    return dict.fromkeys(targets, _parse_weights(weights, reader, storage))


def _parse_weights(reader: ConfigReader, group: ConfigReader, storage: str) -> Codec:
    refuse_unknown(
        reader,
        {
            "num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "actorder",
            "observer", "observer_kwargs", "scale_dtype", "zp_dtype", "block_structure",
        },
    )  # fmt: skip
    kind = reader.choice("type", tuple(_STORAGE), "int")
    if reader.boolean("dynamic", False):
        reader.fail("dynamic", "false")
    _check_order(reader)
    if storage not in _STORAGE[kind]:
        group.fail("format", f"one of {', '.join(_STORAGE[kind])}, as the type is {kind}")
    bits = reader.integer("num_bits", 1, 32, 8)
    scaling = _parse_scaling(reader, kind)
    if storage == PACKED:
        return _parse_packed(reader, bits, scaling)
    if bits != 8:
        reader.fail("num_bits", f"8, as the format is {storage}")
    if kind == "float" and not scaling.symmetric:
        reader.fail("symmetric", "true, as the type is float")
    return ScaledBytes("fp8" if kind == "float" else "int8", scaling)


def _parse_packed(reader: ConfigReader, bits: int, scaling: Scaling) -> PackedIntegers:
    if bits not in (4, 8):
        reader.fail("num_bits", "4 or 8")
    if scaling.strategy == "tensor" and not scaling.symmetric:
        reader.fail("strategy", "'channel' or 'group', as zero points are packed")
    return PackedIntegers(bits, scaling)


def _parse_scaling(reader: ConfigReader, kind: str) -> Scaling:
    group_size = reader.optional_integer("group_size", -1, MAX_BLOCK)
    strategy = reader.choice("strategy", _STRATEGIES[kind], _usual_strategy(group_size))
    symmetric = reader.boolean("symmetric", True)
    block = reader.integers("block_structure", 1, MAX_BLOCK)
    if len(block) != (2 if strategy == "block" else 0):
        reader.fail("block_structure", "two integers if the strategy is block, else nothing")
    if strategy == "block":
        return Scaling(strategy, (block[0], block[1]), symmetric)
    if strategy != "group":
        if group_size is not None and group_size > 0:
            reader.fail("group_size", f"null or -1, as the strategy is {strategy}")
        return Scaling(strategy, symmetric=symmetric)
    if group_size is None or group_size < 1:
        reader.fail("group_size", "a positive integer, as the strategy is group")
    return Scaling(strategy, (1, group_size), symmetric)


def _usual_strategy(group_size: int | None) -> str:
    if group_size is None:
        return "tensor"
    return "channel" if group_size == -1 else "group"


def _check_order(reader: ConfigReader) -> None:
    """An order of the columns that was only used to calibrate changes nothing in the files."""
    if reader.raw.get("actorder") in (None, False, "weight", "static"):
        return
    reader.fail(
        "actorder",
        "null, 'weight' or 'static'",
        fix="columns in another order (g_idx) are not supported",
    )


def _check_activations(reader: ConfigReader) -> None:
    """Activations that would be quantised on the fly are computed unquantised: the weights are
    the same, the results nearer to those of the model before it was quantised."""
    activations = reader.child("input_activations")
    if activations is not None and activations.raw.get("dynamic") is not True:
        activations.fail("dynamic", "true", fix="static scales of activations are not supported")


def _check_sparsity(reader: ConfigReader) -> None:
    sparsity = reader.child("sparsity_config")
    if sparsity is not None and sparsity.raw:
        sparsity.choice("format", ("dense",))


def _patterns(reader: ConfigReader, key: str) -> tuple[str, ...]:
    entries = names(reader, key)
    for entry in entries:
        if entry.startswith(REGEX):
            expected = check_pattern(entry.removeprefix(REGEX))
            if expected is not None:
                reader.fail(key, f"{expected}, not {entry[:60]!r}")
    return entries
