"""The start-up self-test and the raw array conversions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from expertmesh_kernels import self_test
from expertmesh_kernels.host import as_array, as_rows, to_torch
from expertmesh_kernels.self_test import experts_fingerprint, numerics_fingerprint


def test_fingerprint_is_16_bytes_and_repeats() -> None:
    """The same process gives the same fingerprint, and each dtype its own."""
    first = numerics_fingerprint("float32")
    assert len(first) == 16
    assert first == numerics_fingerprint("float32")
    assert first != numerics_fingerprint("bfloat16")
    assert experts_fingerprint("float32") == experts_fingerprint("float32") != first


def test_an_expert_worker_compiles_nothing_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts sooner; a fault of what it computes with is found all the same."""
    monkeypatch.setattr(self_test, "paged_attention", None)
    assert len(experts_fingerprint("float32")) == 16
    monkeypatch.setattr(self_test, "grouped_mlp", lambda x_RH, rows, *_: x_RH[rows] * len(rows))
    with pytest.raises(RuntimeError, match="grouped_mlp with silu depends on neighbouring rows"):
        experts_fingerprint("float32")


def test_a_kernel_that_depends_on_its_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op whose bits change with the number of rows fails the self-test."""

    def uneven(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        return x_TH * len(x_TH)

    monkeypatch.setattr(self_test, "rms_norm", uneven)
    with pytest.raises(RuntimeError, match="norm depends on neighbouring rows"):
        numerics_fingerprint("float32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_raw_bfloat16_becomes_a_tensor_of_its_own(dtype: torch.dtype) -> None:
    """Bits arrive as values, and later changes of the source don't show."""
    raw = np.array([[0x3F80, 0xC000]], np.uint16)
    raw.flags.writeable = False
    tensor = to_torch(raw, "bfloat16", dtype)
    assert dtype == tensor.dtype
    assert tensor.tolist() == [[1.0, -2.0]]


def test_float_arrays_are_copied() -> None:
    """A tensor never shares memory with the host array."""
    raw = np.array([1.0, 2.0], np.float32)
    tensor = to_torch(raw, "float32", torch.float32)
    raw[0] = 9.0
    assert tensor.tolist() == [1.0, 2.0]


def test_rows_of_a_slice_are_written_through() -> None:
    """A column slice is seen in place with its row distance; rows with gaps are refused."""
    fused = torch.zeros(3, 10)
    rows, stride = as_rows(fused[:, 2:6].view(3, 2, 2))
    rows[stride] = 5.0
    assert stride == 10
    assert fused[1, 2].item() == 5.0
    with pytest.raises(ValueError, match="expected contiguous rows"):
        as_rows(fused[:, ::2])


def test_arrays_share_memory_with_contiguous_tensors() -> None:
    """Kernels write into the tensor itself; 16-bit types appear as their bits."""
    tensor = torch.ones(2, dtype=torch.bfloat16)
    as_array(tensor)[0] = 0xC000
    assert tensor.tolist() == [-2.0, 1.0]
    assert np.int16 == as_array(tensor.half()).dtype
