"""Dispatch plan and combine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from expertmesh_kernels.combine import combine, combine_reference
from expertmesh_kernels.dispatch import plan_dispatch


def test_dispatch_sends_each_row_once_per_worker() -> None:
    """Rows ascend, experts ascend within a row, and slots name where outputs belong."""
    topk = np.array([[3, 0], [1, 2], [0, 1]], np.int32)
    plan = plan_dispatch(topk, np.array([0, 0, 1, 1], np.int32), num_generated_rows=1)
    first, second = plan
    assert (first.worker, second.worker) == (0, 1)
    assert first.row_ids_R.tolist() == [0, 1, 2]
    assert first.row_offsets.tolist() == [0, 1, 2, 4]
    assert first.expert_ids_N.tolist() == [0, 1, 0, 1]
    assert first.slot_ids_N.tolist() == [1, 2, 4, 5]
    assert second.row_ids_R.tolist() == [0, 1]
    assert second.expert_ids_N.tolist() == [3, 2]
    assert second.slot_ids_N.tolist() == [0, 3]
    assert (first.num_generated_rows, second.num_generated_rows) == (1, 1)


def test_dispatch_covers_every_slot_once() -> None:
    """Over all expert workers each top-k slot occurs once, with its expert on its worker."""
    rng = np.random.default_rng(0)
    topk = np.array([rng.permutation(16)[:4] for _ in range(33)], np.int32)
    worker_of_expert = rng.integers(0, 5, 16).astype(np.int32)
    plan = plan_dispatch(topk, worker_of_expert, num_generated_rows=20)
    slots = np.concatenate([rows.slot_ids_N for rows in plan])
    assert list(range(33 * 4)) == sorted(slots.tolist())
    for rows in plan:
        row_of_output = np.repeat(rows.row_ids_R, np.diff(rows.row_offsets.astype(np.int64)))
        np.testing.assert_array_equal(rows.slot_ids_N // 4, row_of_output)
        np.testing.assert_array_equal(topk.reshape(-1)[rows.slot_ids_N], rows.expert_ids_N)
        assert {rows.worker} == set(worker_of_expert[rows.expert_ids_N].tolist())
        assert rows.num_generated_rows == np.count_nonzero(rows.row_ids_R < 20)


def test_dispatch_of_no_tokens_is_empty() -> None:
    """No token, no message."""
    nothing = np.empty((0, 2), np.int32)
    assert plan_dispatch(nothing, np.zeros(4, np.int32), num_generated_rows=0) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_combine_matches_the_reference_and_is_invariant(dtype: torch.dtype) -> None:
    """The weighted sum agrees with PyTorch; a token alone gets the bits it gets in a batch."""
    outputs = torch.randn(28, 33, generator=torch.Generator().manual_seed(1)).to(dtype)
    weights = np.random.default_rng(1).random((7, 4)).astype(np.float32)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    together = combine(outputs, weights)
    expected = combine_reference(outputs, weights)
    torch.testing.assert_close(together, expected, rtol=tolerance, atol=tolerance)
    alone = [combine(outputs[4 * t : 4 * t + 4], weights[t : t + 1]) for t in range(7)]
    assert torch.equal(together, torch.cat(alone))


def test_combine_checks_the_number_of_outputs() -> None:
    """A missing output is an error, never a shorter sum."""
    with pytest.raises(ValueError, match="5 outputs, expected 3"):
        combine(torch.zeros(5, 4), np.ones((3, 2), np.float32))
