"""Copies for load, and their packing."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gateway.placement.arrays import Floats, Ints
from gateway.placement.eplb import pack, replicate

NO_BOUND = np.array([-np.inf])


def copies_for(load: list[float], num_copies: int, most: int = 99) -> list[int]:
    """Copies of each expert of one layer, where nothing was held before."""
    load_LE = np.array([load])
    one_LE = np.ones(load_LE.shape, dtype=np.int64)
    return replicate(load_LE, one_LE, most, num_copies, NO_BOUND, one_LE, 0.0)[0].tolist()


def test_spare_slots_go_to_the_largest_load_per_copy() -> None:
    """One by one; the example is that of the published algorithm: 16 slots for 12 experts."""
    first = [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
    second = [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]
    # 183 and 165 are halved, then 132, then 104: nothing larger per copy is left.
    assert copies_for(first, 16) == [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1]
    assert copies_for(second, 16) == [1, 1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 1]


def test_no_more_copies_than_workers_or_slots() -> None:
    """An expert has at most one copy a worker, a layer at most its slots."""
    assert copies_for([100, 1, 1], 9, most=3) == [3, 3, 3]
    assert copies_for([100, 1, 1], 4, most=3) == [2, 1, 1]


def test_copies_are_kept_at_a_lower_load() -> None:
    """What has a second copy keeps it against one that is hotter by less than the gain."""
    load_LE, one_LE = np.array([[10.0, 10.5, 1.0]]), np.ones((1, 3), dtype=np.int64)
    held_LE = np.array([[2, 1, 1]])
    assert replicate(load_LE, one_LE, 4, 4, NO_BOUND, held_LE, 0.1).tolist() == [[2, 1, 1]]
    assert replicate(load_LE, one_LE, 4, 4, NO_BOUND, held_LE, 0.0).tolist() == [[1, 2, 1]]


loads = st.lists(st.floats(0.001, 1000), min_size=1, max_size=12)


@given(load=loads, num_workers=st.integers(1, 6), spare=st.integers(0, 12))
def test_packing_keeps_to_room_and_evens_load(
    load: list[float], num_workers: int, spare: int
) -> None:
    """Every copy has a place on another worker; nobody is above the mean by more than a copy."""
    load_LE: Floats = np.array([load])
    one_LE: Ints = np.ones(load_LE.shape, dtype=np.int64)
    copies_LE = replicate(load_LE, one_LE, num_workers, len(load) + spare, NO_BOUND, one_LE, 0.0)
    ample_LW = np.full((1, num_workers), len(load))
    holds_LEW = pack(load_LE, copies_LE, ample_LW)
    assert (holds_LEW.sum(axis=2) == copies_LE).all()
    per_copy_E = load_LE[0] / copies_LE[0]
    sums_W = per_copy_E @ holds_LEW[0]
    if copies_LE.max() == 1:  # else an expert may have to take the worker that is not the lightest
        assert sums_W.max() <= sums_W.mean() + per_copy_E.max() + 1e-6
    tight_LW = np.full((1, num_workers), -(-int(copies_LE.sum()) // num_workers))
    assert (pack(load_LE, copies_LE, tight_LW).sum(axis=1) <= tight_LW).all()
