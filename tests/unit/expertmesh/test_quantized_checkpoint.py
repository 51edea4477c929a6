"""Quantised checkpoints are read decoded, expert by expert; whatever is wrong is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from expertmesh.checkpoint import Checkpoint, HostTensor
from expertmesh.errors import CheckpointError
from expertmesh.families.config_reader import Json
from expertmesh.formats.codec import Codec, PartData
from expertmesh.formats.encode import encode
from expertmesh.formats.fp8 import Fp8Blocks
from expertmesh.formats.packed import PackedIntegers
from expertmesh.formats.scaled import ScaledBytes
from expertmesh.formats.scaling import Scaling
from expertmesh.safetensors_file import pread_into
from tests.support.quantized_folders import (
    Parts,
    change_config,
    quantized_folder,
    read_parts,
    write_parts,
)
from tests.support.tiny_folders import (
    LLAMA_CONFIG,
    MIXTRAL_CONFIG,
    E,
    Tensors,
    fused,
    llama_tensors,
    mixtral_tensors,
)

MOE = "model.layers.1.block_sparse_moe."
EXPERT = MOE + "experts.2."
GATE = MOE + "gate.weight"
O_PROJ = "model.layers.0.self_attn.o_proj.weight"
EMBED = "model.embed_tokens.weight"

FP8: Json = {"quant_method": "fp8", "weight_block_size": [16, 10]}
ATTENTION_ONLY: Json = {**FP8, "modules_to_not_convert": ["model.layers.*.block_sparse_moe"]}


def compressed(storage: str = "pack-quantized", **weights: object) -> Json:
    """Experts in groups of 8 columns of 4 bits, with changes."""
    usual: Json = {"num_bits": 4, "strategy": "group", "group_size": 8}
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "config_groups": {"g": {"targets": ["Linear"], "weights": usual | weights}},
        "ignore": ["lm_head", "re:.*self_attn"],
    }


INT8 = compressed("int-quantized", num_bits=8, strategy="channel", group_size=None)


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
    found = dict(checkpoint.attention_parameters())
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
    found = dict(Checkpoint.open(folder).attention_parameters())
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
    head = dict(Checkpoint.open(folder).attention_parameters())["lm_head"]
    assert_same(coded(Fp8Blocks(16, 10), tensors["lm_head.weight"]), head)
    parts = read_parts(folder)
    del parts["lm_head.weight_scale_inv"]
    parts["lm_head.weight"] = PartData(tensors["lm_head.weight"], "F32")
    write_parts(folder, parts)
    head = dict(Checkpoint.open(folder).attention_parameters())["lm_head"]
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


Change = Callable[[Parts], None]


def drop(name: str) -> Change:
    """Without a tensor."""
    return lambda parts: parts.__delitem__(name)


def put(name: str, data: npt.NDArray[np.generic], code: str) -> Change:
    """With another tensor."""
    return lambda parts: parts.__setitem__(name, PartData(data, code))


def copy(name: str, new: str) -> Change:
    """With a tensor under a second name."""
    return lambda parts: parts.__setitem__(new, parts[name])


def poke(name: str, value: object) -> Change:
    """With another first element."""
    return lambda parts: parts[name].data.reshape(-1).__setitem__(0, value)


def both(first: Change, second: Change) -> Change:
    """One after the other."""

    def change(parts: Parts) -> None:
        first(parts)
        second(parts)

    return change


W1, SCALE = EXPERT + "w1.weight", EXPERT + "w1.weight_scale_inv"
PACKED, INT_SCALE = EXPERT + "w1.weight_packed", EXPERT + "w1.weight_scale"
F4, I1 = np.dtype("<f4"), np.dtype("i1")


@pytest.mark.parametrize(
    ("config", "change", "expected"),
    [
        (FP8, drop(SCALE), f"tensor {SCALE}: expected once, found nowhere"),
        (FP8, drop(W1), f"tensor {W1}: expected once, found nowhere"),
        (FP8, put(SCALE, np.ones((3, 2), F4), "F32"), f"{SCALE}: expected shape [2, 2], found [3,"),
        (FP8, put(SCALE, np.ones((2, 2), I1), "I8"), f"{SCALE}: expected type F32 or BF16 or F16"),
        (FP8, put(SCALE, np.ones((2, 2), "u1"), "U8"), f"{SCALE}: expected type F32 or BF16 or"),
        (FP8, put(W1, np.ones((24, 16), I1), "I8"), f"{W1}: expected type F8_E4M3, found I8"),
        (FP8, put(W1, np.ones((16, 24), I1), "F8_E4M3"), f"{W1}: expected shape [24, 16], found"),
        (
            FP8,
            put(W1, np.ones((24, 16), F4), "F32"),
            f"{W1}: expected fp8 in blocks of 16 x 10 as quantization_config says, found a plain "
            "tensor of type F32 (add its module to quantization_config.modules_to_not_convert",
        ),
        (
            ATTENTION_ONLY,
            put(W1, np.ones((24, 16), "u1"), "F8_E4M3"),
            f"{W1}: expected type F32 or BF16 or F16 as quantization_config leaves its module out "
            "(modules_to_not_convert), found F8_E4M3",
        ),
        (
            FP8,
            put(GATE, np.ones((E, 16), "u1"), "F8_E4M3"),
            f"{GATE}: expected type F32 or BF16 or F16 as gates, norms, biases and embeddings are "
            "never quantised, found F8_E4M3",
        ),
        (
            FP8,
            both(drop(GATE), put(GATE + "_packed", np.ones((1, 1), "<i4"), "I32")),
            f"{GATE}_packed: expected type F32 or BF16 or F16 as gates, norms",
        ),
        (FP8, put(EMBED, np.ones((40, 16), "u1"), "F8_E4M3"), f"{EMBED}: expected type F32"),
        (FP8, copy(SCALE, GATE + "_scale_inv"), f"{GATE}_scale_inv: not a tensor of the family"),
        (FP8, copy(SCALE, EXPERT + "w1.input_scale"), "w1.input_scale: not a tensor of the family"),
        (compressed(), drop(INT_SCALE), f"{INT_SCALE}: expected once, found nowhere"),
        (compressed(), drop(EXPERT + "w1.weight_shape"), "w1.weight_shape: expected once, found"),
        (
            compressed(),
            put(PACKED, np.ones((24, 3), "<i4"), "I32"),
            "expected shape [24, 2], found",
        ),
        (
            compressed(),
            put(PACKED, np.ones((24, 2), F4), "F32"),
            "w1.weight_packed: expected type I32",
        ),
        (
            compressed(),
            put(EXPERT + "w1.weight_g_idx", np.ones(16, "<i4"), "I32"),
            "w1.weight_g_idx: not a tensor of the family",
        ),
        (
            compressed(),
            put(EXPERT + "w1.weight_zero_point", np.ones((3, 2), "<i4"), "I32"),
            "w1.weight_zero_point: not a tensor of the family",
        ),
        (
            compressed(symmetric=False),
            drop(EXPERT + "w1.weight_zero_point"),
            "w1.weight_zero_point: expected once, found nowhere",
        ),
        (
            compressed(),
            put(O_PROJ + "_packed", np.ones((16, 2), "<i4"), "I32"),
            f"{O_PROJ}_packed: not a tensor of the family",
        ),
        (
            compressed(),
            both(drop(O_PROJ), put(O_PROJ + "_packed", np.ones((16, 2), "<i4"), "I32")),
            f"{O_PROJ}_packed: expected type F32 or BF16 or F16 as quantization_config leaves its "
            "module out (ignore), found I32",
        ),
        (INT8, put(W1, np.ones((24, 16), "u1"), "U8"), f"{W1}: expected type I8, found U8"),
    ],
)
def test_wrong_content_is_named(
    tmp_path: Path, config: Json, change: Change, expected: str
) -> None:
    """Each way of breaking a folder gives one line, before any weight is read."""
    folder = quantized_folder(tmp_path / "m", MIXTRAL_CONFIG, mixtral_tensors(), config)
    parts = read_parts(folder)
    change(parts)
    write_parts(folder, parts)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert expected in str(caught.value)
    assert caught.value.fix != ""
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "change", "expected"),
    [
        (FP8, poke(W1, 0x7F), f"tensor {W1}: holds NaN or infinity, expected finite weights"),
        (FP8, poke(W1, 0xFF), f"tensor {W1}: holds NaN or infinity, expected finite weights"),
        (FP8, poke(SCALE, np.nan), f"tensor {SCALE}: holds NaN or infinity, expected finite sc"),
        (FP8, poke(SCALE, np.inf), f"tensor {SCALE}: holds NaN or infinity, expected finite sc"),
        (FP8, poke(SCALE, 3e38), f"tensor {W1}: holds NaN or infinity, expected finite weights"),
        (compressed(), poke(INT_SCALE, -np.inf), f"tensor {INT_SCALE}: holds NaN or infinity"),
        (
            compressed(),
            poke(EXPERT + "w1.weight_shape", 25),
            f"tensor {EXPERT}w1.weight_shape: expected [24, 16], found [25, 16]",
        ),
    ],
)
def test_wrong_values_are_named_when_they_are_read(
    tmp_path: Path, config: Json, change: Change, expected: str
) -> None:
    """Codes of NaN, scales that are none, products too large; other experts can be read."""
    folder = quantized_folder(tmp_path / "m", MIXTRAL_CONFIG, mixtral_tensors(), config)
    parts = read_parts(folder)
    change(parts)
    write_parts(folder, parts)
    checkpoint = Checkpoint.open(folder)
    checkpoint.read_expert(1, 1)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read_expert(1, 2)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_config_that_says_nothing_of_quantised_files(tmp_path: Path) -> None:
    """Codes without a quantization_config are not guessed at."""
    folder = quantized_folder(tmp_path / "m", MIXTRAL_CONFIG, mixtral_tensors(), FP8)
    change_config(folder, None)
    with pytest.raises(CheckpointError, match=r"as config\.json has no quantization_config, found"):
        Checkpoint.open(folder)


def test_config_that_says_too_much_of_plain_files(tmp_path: Path) -> None:
    """A plain folder with a quantization_config is not read as if it had none."""
    folder = quantized_folder(tmp_path / "m", MIXTRAL_CONFIG, mixtral_tensors(), FP8)
    plain = folder.with_name("m-plain")
    (plain / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"q_proj\.weight: expected fp8 in blocks of 16 x 10"):
        Checkpoint.open(plain)


def test_weights_that_groups_do_not_divide(tmp_path: Path) -> None:
    """Groups that the columns are no multiple of are said at once."""
    folder = quantized_folder(tmp_path / "m", MIXTRAL_CONFIG, mixtral_tensors(), compressed())
    change_config(folder, compressed(group_size=5))
    with pytest.raises(CheckpointError, match=r"w1\.weight: groups of 5 columns do not divide its"):
        Checkpoint.open(folder)


def test_scales_may_have_other_types(tmp_path: Path) -> None:
    """Scales in float16 are widened exactly."""
    folder = quantized_folder(tmp_path / "m", MIXTRAL_CONFIG, mixtral_tensors(), FP8)
    parts = read_parts(folder)
    halves = parts[SCALE].data.astype(np.float16)
    parts[SCALE] = PartData(halves, "F16")
    write_parts(folder, parts)
    found = Checkpoint.open(folder).read_expert(1, 2).gate_up.data[:24]
    expected = np.empty((24, 16), np.float32)
    Fp8Blocks(16, 10).decode([parts[W1], PartData(halves.astype(F4), "F32")], expected)
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
