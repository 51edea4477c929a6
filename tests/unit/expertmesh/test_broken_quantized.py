"""Every way of breaking a quantised checkpoint gives one line that names the culprit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import CheckpointError
from expertmesh.families.config_reader import Json
from tests.support.quantized_folders import (
    ATTENTION_ONLY,
    FP8,
    INT8,
    Change,
    both,
    change_config,
    compressed,
    copy,
    drop,
    poke,
    put,
    quantized_folder,
    read_parts,
    write_parts,
)
from tests.support.tiny_folders import MIXTRAL_CONFIG, E, mixtral_tensors

EXPERT = "model.layers.1.block_sparse_moe.experts.2."
GATE = "model.layers.1.block_sparse_moe.gate.weight"
O_PROJ = "model.layers.0.self_attn.o_proj.weight"
EMBED = "model.embed_tokens.weight"
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
        (compressed(), drop(PACKED), f"tensor {PACKED}: expected once, found nowhere"),
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
