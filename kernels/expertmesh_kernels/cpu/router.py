"""Softmax and top-k of the gate's logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.primitives import exp


@njit
def softmax_topk(
    logits_TE: NDArray[np.float32],
    renormalize: bool,
    ids_TK: NDArray[np.int32],
    weights_TK: NDArray[np.float32],
) -> None:
    """The k largest logits of each row, ties to the lowest id, and their softmax weights.

    NaN counts as -inf, so it is chosen last. Where the softmax is undefined (no finite maximum)
    the chosen experts share equally.
    """
    num_experts = logits_TE.shape[1]
    top_k = ids_TK.shape[1]
    taken = np.empty(num_experts, np.bool_)
    for t in range(logits_TE.shape[0]):
        logits = logits_TE[t]
        taken[:] = False
        for j in range(top_k):
            ids_TK[t, j] = _largest_free(logits, taken)
            taken[ids_TK[t, j]] = True
        _weights(logits, renormalize, ids_TK[t], weights_TK[t])


@njit
def _largest_free(logits: NDArray[np.float32], taken: NDArray[np.bool_]) -> int:
    best = -1
    best_logit = np.float32(-np.inf)
    for e in range(logits.size):
        if not taken[e] and (best < 0 or logits[e] > best_logit):
            best = e
            best_logit = np.float32(-np.inf) if np.isnan(logits[e]) else logits[e]
    return best


@njit
def _weights(
    logits: NDArray[np.float32],
    renormalize: bool,
    ids: NDArray[np.int32],
    weights: NDArray[np.float32],
) -> None:
    top = logits[ids[0]]
    if not np.isfinite(top):
        weights[:] = np.float32(1.0) / np.float32(ids.size)
        return
    total = np.float32(0.0)
    if renormalize:
        for j in range(ids.size):
            total += _shifted_exp(logits[ids[j]], top)
    else:
        for e in range(logits.size):
            total += _shifted_exp(logits[e], top)
    for j in range(ids.size):
        weights[j] = _shifted_exp(logits[ids[j]], top) / total


@njit
def _shifted_exp(logit: np.float32, top: np.float32) -> np.float32:
    return np.float32(0.0) if np.isnan(logit) else exp(logit - top)
