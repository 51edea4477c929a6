"""Stacked MXFP4 experts of gpt-oss: read one by one, whatever is wrong is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import CheckpointError
from expertmesh.formats.codec import PartData
from expertmesh.formats.encode import encode
from expertmesh.formats.mxfp4 import Mxfp4
from expertmesh.model_tools.make_tiny import make_tiny
from expertmesh.model_tools.quantize import QUANTIZATIONS, quantize_model
from expertmesh.safetensors_file import pread_into
from tests.support.quantized_folders import Parts, change_config, read_parts, write_parts

EXPERTS = "model.layers.1.mlp.experts."
BLOCKS, SCALES = EXPERTS + "gate_up_proj_blocks", EXPERTS + "gate_up_proj_scales"
ROUTER = "model.layers.1.mlp.router.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny gpt-oss with MXFP4 experts; beside it, the plain one."""
    make_tiny("gpt_oss", tmp_path / "plain")
    quantize_model(tmp_path / "plain", tmp_path / "m", QUANTIZATIONS["mxfp4"])
    return tmp_path / "m"


def test_experts_are_what_their_codes_mean(folder: Path) -> None:
    """Gate and up apart, inputs as columns, biases as they are."""
    plain = Checkpoint.open(folder.with_name("plain"))
    found, before = Checkpoint.open(folder).read_expert(1, 3), plain.read_expert(1, 3)
    for now, then in ((found.gate_up, before.gate_up), (found.down, before.down)):
        expected = np.empty(then.shape, np.float32)
        Mxfp4().decode(encode(Mxfp4(), then.data.astype(np.float32)), expected)
        np.testing.assert_array_equal(expected, now.data)
        assert now.dtype == "float32"
        assert now.data.flags.c_contiguous
    assert found.gate_up_bias is not None
    assert before.gate_up_bias is not None
    np.testing.assert_array_equal(before.gate_up_bias.data, found.gate_up_bias.data)


def test_reading_an_expert_reads_its_bytes_only(folder: Path) -> None:
    """Half a byte per weight, and a byte per 32."""
    read: list[int] = []

    def counting(descriptor: int, buffer: memoryview, offset: int) -> int:
        read.append(len(buffer))
        return pread_into(descriptor, buffer, offset)

    checkpoint = Checkpoint.open(folder, read_into=counting)
    read.clear()
    expert = checkpoint.read_expert(0, 2)
    assert expert.gate_up_bias is not None
    assert expert.down_bias is not None
    weights = expert.gate_up.data.size + expert.down.data.size
    biases = expert.gate_up_bias.nbytes + expert.down_bias.nbytes
    assert weights * 17 // 32 + biases == sum(read) == checkpoint.expert_nbytes()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda parts: parts.pop(SCALES), f"tensor {SCALES}: expected once, found nowhere"),
        (lambda parts: parts.pop(BLOCKS), f"{EXPERTS}gate_up_proj_blocks: expected once, found"),
        (
            lambda parts: parts.update({SCALES: PartData(np.ones((6, 64, 1), "u1"), "U8")}),
            f"tensor {SCALES}: expected shape [6, 64, 2], found [6, 64, 1]",
        ),
        (
            lambda parts: parts.update({SCALES: PartData(np.ones((6, 64, 2), "i1"), "I8")}),
            f"tensor {SCALES}: expected type U8, found I8",
        ),
        (
            lambda parts: parts.update({ROUTER + "_blocks": parts.pop(ROUTER)}),
            f"tensor {ROUTER}_blocks: expected type F32 or BF16 or F16 as gates, norms, biases",
        ),
    ],
)
def test_wrong_content_is_named(
    folder: Path, change: Callable[[Parts], object], expected: str
) -> None:
    """Missing, misshapen and mistyped tensors."""
    parts = read_parts(folder)
    change(parts)
    write_parts(folder, parts)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("scale", "code", "culprit"), [(255, 0x00, SCALES), (254, 0x77, BLOCKS)], ids=["nan", "large"]
)
def test_exponents_that_give_no_number_are_named(
    folder: Path, scale: int, code: int, culprit: str
) -> None:
    """255 is NaN whatever it multiplies; 6 * 2 ** 127 is too large for FP32."""
    parts = read_parts(folder)
    parts[SCALES].data[3, 5, 1] = scale
    parts[BLOCKS].data[3, 5, 1, 0] = code
    write_parts(folder, parts)
    checkpoint = Checkpoint.open(folder)
    checkpoint.read_expert(1, 2)
    with pytest.raises(CheckpointError, match=f"tensor {culprit}: holds NaN or infinity"):
        checkpoint.read_expert(1, 3)


def test_experts_left_out_have_to_be_plain(folder: Path) -> None:
    """A list that names the experts, and files that have them quantised."""
    change_config(folder, {"quant_method": "mxfp4", "modules_to_not_convert": [EXPERTS[:-1]]})
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert f"tensor {BLOCKS}: expected type F32 or BF16 or F16 as quantization_config" in str(
        caught.value
    )
