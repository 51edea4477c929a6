"""Quantised checkpoints are read decoded, expert by expert; whatever is wrong is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from expertmesh.checkpoint import Checkpoint, HostTensor
from expertmesh.families.config_reader import Json
from expertmesh.formats.codec import Codec, PartData
from expertmesh.formats.encode import encode
from expertmesh.formats.fp8 import Fp8Blocks
from expertmesh.formats.packed import PackedIntegers
from expertmesh.formats.scaled import ScaledBytes
from expertmesh.formats.scaling import Scaling
from expertmesh.model_tools.quantize import safetensors_bytes
from expertmesh.safetensors_file import pread_into
from tests.support.parameters import parameters_of
from tests.support.quantized_folders import (
    FP8,
    INT8,
    change_config,
    compressed,
    quantized_folder,
    read_parts,
    write_parts,
)
from tests.support.tiny_folders import (
    LLAMA_CONFIG,
    MIXTRAL_CONFIG,
    Tensors,
    fused,
    llama_tensors,
    mixtral_tensors,
    save_index,
)

MOE = "model.layers.1.block_sparse_moe."
EXPERT = MOE + "experts.2."
GATE = MOE + "gate.weight"
W1, SCALE = EXPERT + "w1.weight", EXPERT + "w1.weight_scale_inv"
EMBED = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Case:
    """A quantization_config and what weights become by it."""

    config: Json
    expert: Codec | None
    attention: Codec | None


CASES = {
    "fp8": Case(FP8, Fp8Blocks(16, 10), Fp8Blocks(16, 10)),
    "fp8-bytes": Case({**FP8, "scale_fmt": "ue8m0"}, Fp8Blocks(16, 10), Fp8Blocks(16, 10)),
    "int4": Case(compressed(), PackedIntegers(4, Scaling("group", (1, 8))), None),
    "int4-asymmetric": Case(
        compressed(symmetric=False), PackedIntegers(4, Scaling("group", (1, 8), False)), None
    ),
    "int8-packed": Case(
        compressed(num_bits=8, strategy="channel", group_size=-1),
        PackedIntegers(8, Scaling("channel")),
        None,
    ),
    "int8": Case(INT8, ScaledBytes("int8", Scaling("channel")), None),
    "fp8-channel": Case(
        compressed("float-quantized", type="float", num_bits=8, strategy="channel", group_size=-1),
        ScaledBytes("fp8", Scaling("channel")),
        None,
    ),
    "int8-naive": Case(
        {**INT8, "format": "naive-quantized"}, ScaledBytes("int8", Scaling("channel")), None
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_what_their_codes_mean(tmp_path: Path, name: str) -> None:
    """Experts and joined parameters come decoded in FP32; plain ones as they are stored."""
    case, tensors = CASES[name], mixtral_tensors()
    folder = quantized_folder(tmp_path / "m", MIXTRAL_CONFIG, tensors, case.config)
    checkpoint = Checkpoint.open(folder)
    expert = checkpoint.read_expert(1, 2)
    gate, up, down = (coded(case.expert, tensors[f"{EXPERT}w{i}.weight"]) for i in (1, 3, 2))
    assert_same(np.concatenate((gate, up)), expert.gate_up)
    assert_same(down, expert.down)
    found = parameters_of(checkpoint)
    prefix = "model.layers.1.self_attn."
    qkv = [coded(case.attention, tensors[f"{prefix}{x}_proj.weight"]) for x in "qkv"]
    assert_same(np.concatenate(qkv), found["layers.1.qkv"])
    assert_same(tensors[GATE], found["layers.1.gate"])
    assert_same(tensors[EMBED], found["embed"])
    assert_same(tensors["lm_head.weight"], found["lm_head"])


def test_dense_models_are_quantised_too(tmp_path: Path) -> None:
    """FFN matrices one below the other, each with its own scales."""
    tensors = llama_tensors()
    folder = quantized_folder(tmp_path / "m", LLAMA_CONFIG, tensors, FP8)
    found = parameters_of(Checkpoint.open(folder))
    mlp = "model.layers.1.mlp."
    gate, up, down = (
        coded(Fp8Blocks(16, 10), tensors[f"{mlp}{x}_proj.weight"]) for x in ("gate", "up", "down")
    )
    assert_same(np.concatenate((gate, up)), found["layers.1.gate_up"])
    assert_same(down, found["layers.1.down"])


def test_output_may_be_quantised(tmp_path: Path) -> None:
    """An lm_head that no list names is read as it is stored."""
    tensors = llama_tensors()
    config = {**FP8, "modules_to_not_convert": []}
    folder = quantized_folder(tmp_path / "m", LLAMA_CONFIG, tensors, config)
    assert read_parts(folder)["lm_head.weight"].dtype_code == "F8_E4M3"
    head = parameters_of(Checkpoint.open(folder))["lm_head"]
    assert_same(coded(Fp8Blocks(16, 10), tensors["lm_head.weight"]), head)
    parts = read_parts(folder)
    del parts["lm_head.weight_scale_inv"]
    parts["lm_head.weight"] = PartData(tensors["lm_head.weight"], "F32")
    write_parts(folder, parts)
    head = parameters_of(Checkpoint.open(folder))["lm_head"]
    assert_same(tensors["lm_head.weight"], head)


def test_stacked_experts_are_read_one_by_one(tmp_path: Path) -> None:
    """An entry of stacked codes and scales; no byte of another expert."""
    tensors = fused(mixtral_tensors())
    folder = quantized_folder(tmp_path / "m", MIXTRAL_CONFIG, tensors, FP8)
    assert "model.layers.1.mlp.experts.down_proj_scale_inv" in read_parts(folder)
    expert = Checkpoint.open(folder).read_expert(1, 2)
    stack = tensors["model.layers.1.mlp.experts.gate_up_proj"]
    assert_same(coded(Fp8Blocks(16, 10), stack[2]), expert.gate_up)


@pytest.mark.parametrize("layout", [dict, fused], ids=["per-expert", "fused"])
@pytest.mark.parametrize("config", [FP8, compressed(), INT8], ids=["fp8", "int4", "int8"])
def test_reading_an_expert_reads_its_bytes_only(
    tmp_path: Path, layout: Callable[[Tensors], Tensors], config: Json
) -> None:
    """Codes and scales of one expert, whatever the layout."""
    if layout is fused and config is not FP8:
        config = FP8 | {"weight_block_size": [24, 16]}
    read: list[int] = []

    def counting(descriptor: int, buffer: memoryview, offset: int) -> int:
        read.append(len(buffer))
        return pread_into(descriptor, buffer, offset)

    folder = quantized_folder(tmp_path / "m", MIXTRAL_CONFIG, layout(mixtral_tensors()), config)
    checkpoint = Checkpoint.open(folder, read_into=counting)
    read.clear()
    expert = checkpoint.read_expert(0, 3)
    assert checkpoint.expert_nbytes() == sum(read) < expert.nbytes / 2


def test_codes_and_scales_may_lie_in_different_files(tmp_path: Path) -> None:
    """Shards are cut anywhere."""
    folder = quantized_folder(tmp_path / "m", MIXTRAL_CONFIG, mixtral_tensors(), FP8)
    whole = Checkpoint.open(folder)
    parts = read_parts(folder)
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"{'scale' in name}.safetensors" for name in parts}
    for file in set(weight_map.values()):
        chosen = {name: part for name, part in parts.items() if weight_map[name] == file}
        (folder / file).write_bytes(b"".join(safetensors_bytes(chosen)))
    save_index(folder, weight_map)
    sharded = Checkpoint.open(folder)
    assert whole.fingerprint == sharded.fingerprint
    assert_same(whole.read_expert(1, 2).down.data, sharded.read_expert(1, 2).down)


def test_fingerprint_covers_codes_scales_and_config(tmp_path: Path) -> None:
    """A changed code, scale or way to read them is another model."""
    folder = quantized_folder(tmp_path / "m", MIXTRAL_CONFIG, mixtral_tensors(), FP8)
    parts, found = read_parts(folder), {Checkpoint.open(folder).fingerprint}
    found.add(Checkpoint.open(folder).fingerprint)
    assert len(found) == 1
    for name in (EXPERT + "w1.weight", EXPERT + "w1.weight_scale_inv"):
        parts[name].data.reshape(-1)[0] += 1
        write_parts(folder, parts)
        found.add(Checkpoint.open(folder).fingerprint)
    change_config(folder, {**FP8, "scale_fmt": "ue8m0"})
    found.add(Checkpoint.open(folder).fingerprint)
    assert len(found) == 4


def test_scales_may_have_other_types(tmp_path: Path) -> None:
    """Scales in float16 are widened exactly."""
    folder = quantized_folder(tmp_path / "m", MIXTRAL_CONFIG, mixtral_tensors(), FP8)
    parts = read_parts(folder)
    halves = parts[SCALE].data.astype(np.float16)
    parts[SCALE] = PartData(halves, "F16")
    write_parts(folder, parts)
    found = Checkpoint.open(folder).read_expert(1, 2).gate_up.data[:24]
    expected = np.empty((24, 16), np.float32)
    Fp8Blocks(16, 10).decode([parts[W1], PartData(halves.astype("<f4"), "F32")], expected)
    np.testing.assert_array_equal(expected, found)


def coded(codec: Codec | None, weight: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """What is left of a weight after storing it."""
    if codec is None:
        return weight
    found = np.empty(weight.shape, np.float32)
    codec.decode(encode(codec, weight.astype(np.float32)), found)
    assert not np.array_equal(weight, found)
    return found


def assert_same(expected: npt.NDArray[np.generic], found: HostTensor) -> None:
    """Equal values in FP32, in memory of their own."""
    assert found.dtype == "float32"
    assert found.data.flags.owndata
    assert found.data.flags.c_contiguous
    np.testing.assert_array_equal(expected, found.data)
