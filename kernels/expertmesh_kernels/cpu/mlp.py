"""Gated FFN of one expert over chosen rows, fused from gather to scatter."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.activation import gated_activation
from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.linear import linear_rows
from expertmesh_kernels.cpu.primitives import narrow_like, widen


@njit
def gated_mlp(
    x_RH: NDArray[np.generic],
    rows_N: NDArray[np.int64],
    gate_up: NDArray[np.generic],
    gate_up_bias: NDArray[np.float32],
    down: NDArray[np.generic],
    down_bias: NDArray[np.float32],
    width: int,
    kind: int,
    alpha: np.float32,
    limit: np.float32,
    out: NDArray[np.generic],
    out_rows_N: NDArray[np.int64],
) -> None:
    """out[out_rows[n]] = down(act(gate(x[rows[n]]), up(x[rows[n]]))).

    The product with `down` takes the activations rounded to the type of x.

    Args:
        x_RH: Stored rows.
        rows_N: Rows to compute.
        gate_up: Flat panels, H -> 2I.
        gate_up_bias: [2I] or empty.
        down: Flat panels, I -> H.
        down_bias: [H] or empty.
        width: I.
        kind: Of the activation; see `expertmesh_kernels.cpu.activation`.
        alpha: Of the activation.
        limit: Of the activation.
        out: [.., H], of the type of x.
        out_rows_N: Where results go.
    """
    num_rows = rows_N.size
    hidden = x_RH.shape[1]
    wide = np.empty((num_rows, hidden), np.float32)
    for n in range(num_rows):
        source = x_RH[rows_N[n]]
        target = wide[n]
        for h in range(hidden):
            target[h] = widen(source[h])
    gate_up_N2I = np.empty((num_rows, 2 * width), np.float32)
    linear_rows(
        wide.reshape(wide.size), 0, hidden, num_rows,
        gate_up, 0, hidden, gate_up_bias,
        gate_up_N2I.reshape(gate_up_N2I.size), 0, 2 * width, 2 * width,
    )  # fmt: skip
    act_NI = np.empty((num_rows, width), np.float32)
    gated_activation(gate_up_N2I, kind, alpha, limit, act_NI)
    for n in range(num_rows):
        act = act_NI[n]
        for i in range(width):
            act[i] = widen(narrow_like(act[i], x_RH))
    linear_rows(
        act_NI.reshape(act_NI.size), 0, width, num_rows,
        down, 0, width, down_bias,
        wide.reshape(wide.size), 0, hidden, hidden,
    )  # fmt: skip
    for n in range(num_rows):
        source_wide = wide[n]
        result = out[out_rows_N[n]]
        for h in range(hidden):
            result[h] = narrow_like(source_wide[h], out)
