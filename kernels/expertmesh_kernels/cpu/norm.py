"""RMS normalisation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.memory import array_at
from expertmesh_kernels.cpu.primitives import fma, narrow_like, widen
from expertmesh_kernels.cpu.scratch import scratch_floats
from expertmesh_kernels.cpu.team import parallel_for
from expertmesh_kernels.cpu.tile import add_strips

_LANES = 16
_ROWS_PER_CHUNK = 32


@njit
def rms_norm(
    x: NDArray[np.generic],
    out: NDArray[np.generic],
    strides: tuple[int, int],
    shape: tuple[int, int],
    weight: NDArray[np.float32],
    eps: np.float32,
    round_first: bool,
) -> None:
    """out = x / rms(x) * weight, for each part of each row; `out` may be `x`.

    The sum of squares has 16 chains, chain l over h = l, l + 16, ...; they are added pairwise,
    l with l + 8, then + 4, + 2, + 1. A fixed order, so a part's bits depend on the part alone.

    Args:
        x: Flat; a part has as many elements as `weight`.
        out: Flat, of the type of x.
        strides: Distance of two rows, and of two parts of a row, in both.
        shape: Rows, and parts of a row.
        weight: Of each part.
        eps: Added to the mean square.
        round_first: x / rms(x) is rounded before the product, as Llama does it.
    """
    width = weight.size
    wide, sums = scratch_floats(-(-width // _LANES) * _LANES), scratch_floats(_LANES)
    wide[width:] = np.float32(0.0)
    for t in range(shape[0]):
        for part in range(shape[1]):
            at = t * strides[0] + part * strides[1]
            source = x[at : at + width]
            target = out[at : at + width]
            for h in range(width):
                wide[h] = widen(source[h])
            mean = _sum_of_squares(wide, sums) / np.float32(width)
            factor = np.float32(1.0) / np.sqrt(mean + eps)
            if round_first:
                for h in range(width):
                    normal = widen(narrow_like(wide[h] * factor, out))
                    target[h] = narrow_like(normal * weight[h], out)
            else:
                for h in range(width):
                    target[h] = narrow_like(wide[h] * factor * weight[h], out)


@njit
def _sum_of_squares(wide: NDArray[np.float32], sums: NDArray[np.float32]) -> np.float32:
    sums[:] = np.float32(0.0)
    for block in range(wide.size // _LANES):
        values = wide[block * _LANES : block * _LANES + _LANES]
        for lane in range(_LANES):
            sums[lane] = fma(values[lane], values[lane], sums[lane])
    for step in (8, 4, 2, 1):
        for lane in range(step):
            sums[lane] += sums[lane + step]
    return np.float32(sums[0])


@njit
def add_rms_norm(
    x_address: int,
    y_address: int,
    sum_address: int,
    out_address: int,
    like: NDArray[np.generic],
    num_rows: int,
    weight: NDArray[np.float32],
    eps: np.float32,
    round_first: bool,
) -> None:
    """sum = x + y, rounded; out = rms_norm(sum). All contiguous, of the type of `like`."""
    size = num_rows * weight.size
    x, y = array_at(x_address, size, like), array_at(y_address, size, like)
    total, out = array_at(sum_address, size, like), array_at(out_address, size, like)
    add_norm_rows((x, y, total, out), weight, eps, round_first)


@njit
def add_norm_rows(
    rows: tuple[NDArray[np.generic], ...],
    weight: NDArray[np.float32],
    eps: np.float32,
    round_first: bool,
) -> None:
    """`add_rms_norm` of flat x, y, sum, out; sum may be x."""
    num_rows = rows[0].size // weight.size
    parallel_for(_add_norm_chunk, (rows, weight, eps, round_first), -(-num_rows // _ROWS_PER_CHUNK))


@njit
def _add_norm_chunk(
    rows: tuple[NDArray[np.generic], ...],
    weight: NDArray[np.float32],
    eps: np.float32,
    round_first: bool,
    chunk: int,
) -> None:
    x, y, total, out = rows
    width = weight.size
    first = chunk * _ROWS_PER_CHUNK * width
    last = min(first + _ROWS_PER_CHUNK * width, x.size)
    a, b, target = x[first:last], y[first:last], total[first:last]
    whole = target.size // _LANES
    add_strips(a, b, target, whole)
    for i in range(whole * _LANES, target.size):
        target[i] = narrow_like(widen(a[i]) + widen(b[i]), total)
    num_rows = target.size // width
    rms_norm(target, out[first:last], (width, width), (num_rows, 1), weight, eps, round_first)
