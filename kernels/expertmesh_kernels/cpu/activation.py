"""Gated activations. Which one is an argument, so that one compiled FFN serves all models."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.primitives import exp, fma, narrow_like, tanh, widen

SILU = 0
GELU_TANH = 1
CLAMPED_SWIGLU = 2

_ONE = np.float32(1.0)
_HALF = np.float32(0.5)
_GELU_SCALE = np.float32(0.7978845608028654)  # sqrt(2 / pi)
_GELU_CUBE = np.float32(0.044715)


@njit
def gated_activation(
    gate_up_R2I: NDArray[np.generic],
    kind: int,
    alpha: np.float32,
    limit: np.float32,
    out_RI: NDArray[np.generic],
) -> None:
    """out = act(gate, up) in FP32, rounded once; gate is the first half of the columns."""
    width = out_RI.shape[1]
    for r in range(out_RI.shape[0]):
        gate = gate_up_R2I[r, :width]
        up = gate_up_R2I[r, width:]
        if kind == SILU:
            _silu(gate, up, out_RI[r])
        elif kind == GELU_TANH:
            _gelu_tanh(gate, up, out_RI[r])
        else:
            _clamped_swiglu(gate, up, alpha, limit, out_RI[r])


@njit
def _silu(gate: NDArray[np.generic], up: NDArray[np.generic], out: NDArray[np.generic]) -> None:
    """g / (1 + exp(-g)) * u."""
    for i in range(out.size):
        g = widen(gate[i])
        out[i] = narrow_like(g / (_ONE + exp(-g)) * widen(up[i]), out)


@njit
def _gelu_tanh(
    gate: NDArray[np.generic], up: NDArray[np.generic], out: NDArray[np.generic]
) -> None:
    """g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3))) * u."""
    for i in range(out.size):
        g = widen(gate[i])
        inner = _GELU_SCALE * fma(_GELU_CUBE * (g * g), g, g)
        out[i] = narrow_like(_HALF * g * (_ONE + tanh(inner)) * widen(up[i]), out)


@njit
def _clamped_swiglu(
    gate: NDArray[np.generic],
    up: NDArray[np.generic],
    alpha: np.float32,
    limit: np.float32,
    out: NDArray[np.generic],
) -> None:
    """g / (1 + exp(-alpha g)) * (u + 1), with g at most `limit` and u within +-`limit`."""
    for i in range(out.size):
        g = widen(gate[i])
        g = limit if g > limit else g
        u = widen(up[i])
        u = limit if u > limit else u
        u = -limit if u < -limit else u
        out[i] = narrow_like(g / (_ONE + exp(-(alpha * g))) * (u + _ONE), out)


@njit
def sigmoid_scaled(
    x_RH: NDArray[np.generic], logits_R: NDArray[np.float32], out_RH: NDArray[np.generic]
) -> None:
    """out = x / (1 + exp(-logit of the row)) in FP32, rounded once."""
    for r in range(out_RH.shape[0]):
        x, out = x_RH[r], out_RH[r]
        factor = _ONE / (_ONE + exp(-logits_R[r]))
        for h in range(out.size):
            out[h] = narrow_like(factor * widen(x[h]), out)
