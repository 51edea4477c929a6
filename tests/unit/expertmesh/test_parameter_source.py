"""Layouts of stored weights are undone, whatever the sizes and strides."""

from __future__ import annotations

import numpy as np
import pytest

from expertmesh.parameter_source import Arrangement


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(2, 1), (6, 64), (140, 65), (70, 200)])
@pytest.mark.parametrize("view", [False, True])
def test_rows_come_out_as_the_parameter_has_them(
    transposed: bool, interleaved: bool, rows: int, columns: int, view: bool
) -> None:
    """Transposed, gate and up in turns, or both; stored contiguously or as a transposed view."""
    expected = np.arange(rows * columns, dtype=np.uint16).reshape(rows, columns)
    half = rows // 2
    turns = np.stack((expected[:half], expected[half:]), 1).reshape(rows, columns)
    stored = turns if interleaved else expected
    stored = stored.T if transposed else stored
    stored = np.asfortranarray(stored) if view else np.ascontiguousarray(stored)
    arrangement = Arrangement(transposed, interleaved)
    found = np.zeros_like(expected)
    arrangement.place(stored, found)
    np.testing.assert_array_equal(expected, found)
    assert arrangement.num_rows(stored.shape) == rows
