"""SiLU of a panel's sums has the bits of the loop that serves all types."""

from __future__ import annotations

import numpy as np

from expertmesh_kernels.cpu.activation import SILU, gated_activation
from expertmesh_kernels.cpu.gating import silu_rows
from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.tile import HALF_PANEL, PANEL

_STRIDE, _AT = 100, 3


@njit
def _run(
    acc: np.ndarray[tuple[int], np.dtype[np.float32]],
    rows: int,
    target: np.ndarray[tuple[int], np.dtype[np.uint16]],
) -> None:
    silu_rows(acc, rows, target, _AT, _STRIDE)


def test_silu_of_panels_has_the_bits_of_the_loop() -> None:
    """For ordinary sums and the limits of FP32; nothing beside its rows is written."""
    rng = np.random.default_rng(0)
    rows = 33
    sums = (rng.standard_normal((rows, PANEL)) * np.logspace(-20, 4, rows)[:, None]).astype("f4")
    sums[0, ::3] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40, 200.0, -200.0, 89.0, -89.0,
                    -104.0, 104.0, 1.0, -1.0, 88.0, -88.0, 3e38, -3e38, 1e30, 5.0, 7.0]  # fmt: skip
    expected = np.empty((rows, HALF_PANEL), np.uint16)
    zero = np.float32(0.0)
    gated_activation(sums, SILU, zero, zero, expected)
    found = np.full(_AT + rows * _STRIDE, 0xABCD, np.uint16)
    _run(sums.reshape(-1), rows, found)
    table = found[_AT:].reshape(rows, _STRIDE)
    np.testing.assert_array_equal(table[:, :HALF_PANEL], expected)
    assert (table[:, HALF_PANEL:] == 0xABCD).all()
    assert (found[:_AT] == 0xABCD).all()
