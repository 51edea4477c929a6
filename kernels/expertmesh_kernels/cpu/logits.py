"""Changes to logits before a token is chosen. R rows, V vocabulary, S slots, L tokens of a slot."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.primitives import tanh

_MINUS_INF = np.float32(-np.inf)


@njit
def add_bias(
    logits_RV: NDArray[np.float32],
    rows_N: NDArray[np.int64],
    ids_N: NDArray[np.int64],
    bias_N: NDArray[np.float32],
) -> None:
    """logits[row, id] += bias; an id may come twice."""
    for n in range(rows_N.size):
        logits_RV[rows_N[n], ids_N[n]] += bias_N[n]


@njit
def penalize(
    logits_RV: NDArray[np.float32],
    rows_N: NDArray[np.int64],
    token_ids_SL: NDArray[np.int32],
    slots_N: NDArray[np.int64],
    num_prompt_N: NDArray[np.int64],
    ends_N: NDArray[np.int64],
    repetition_N: NDArray[np.float32],
    presence_N: NDArray[np.float32],
    frequency_N: NDArray[np.float32],
) -> None:
    """Penalties of each row's own tokens; `expertmesh_kernels.logits` says how."""
    marks_V = np.zeros(logits_RV.shape[1], np.int32)  # 0: not there, else 1 + times generated
    for n in range(rows_N.size):
        logits = logits_RV[rows_N[n]]
        tokens = token_ids_SL[slots_N[n], : ends_N[n]]
        for i in range(tokens.size):
            mark = max(marks_V[tokens[i]], 1)
            marks_V[tokens[i]] = mark + 1 if i >= num_prompt_N[n] else mark
        for i in range(tokens.size):
            token = tokens[i]
            mark = marks_V[token]
            if mark > 0:
                marks_V[token] = 0
                logit = logits[token]
                logit = logit / repetition_N[n] if logit > 0 else logit * repetition_N[n]
                if mark > 1:
                    logit -= frequency_N[n] * np.float32(mark - 1)
                    logit -= presence_N[n]
                logits[token] = logit


@njit
def ban_sequences(
    logits_RV: NDArray[np.float32],
    rows_W: NDArray[np.int64],
    token_ids_SL: NDArray[np.int32],
    slots_W: NDArray[np.int64],
    starts_W: NDArray[np.int64],
    ends_W: NDArray[np.int64],
    sequences: NDArray[np.int64],
    offsets_W: NDArray[np.int64],
) -> None:
    """-inf for the last token of a sequence whose other tokens are the latest ones."""
    for w in range(rows_W.size):
        sequence = sequences[offsets_W[w] : offsets_W[w + 1]]
        tokens = token_ids_SL[slots_W[w], starts_W[w] : ends_W[w]]
        num_before = sequence.size - 1
        matches = num_before <= tokens.size
        for i in range(num_before if matches else 0):
            matches = matches and tokens[tokens.size - num_before + i] == sequence[i]
        if matches:
            logits_RV[rows_W[w], sequence[num_before]] = _MINUS_INF


@njit
def keep_only(
    logits_RV: NDArray[np.float32], rows_N: NDArray[np.int64], bits_NW: NDArray[np.uint32]
) -> None:
    """-inf for tokens whose bit is 0; bit i of word w is token 32 w + i."""
    vocab_size = logits_RV.shape[1]
    for n in range(rows_N.size):
        logits = logits_RV[rows_N[n]]
        for w in range(bits_NW.shape[1]):
            word = bits_NW[n, w]
            if word == np.uint32(0xFFFFFFFF):
                continue
            for i in range(32 * w, min(32 * w + 32, vocab_size)):
                if (word >> np.uint32(i - 32 * w)) & np.uint32(1) == 0:
                    logits[i] = _MINUS_INF


@njit
def softcap(logits_RV: NDArray[np.float32], cap: np.float32) -> None:
    """logits = cap * tanh(logits / cap)."""
    for r in range(logits_RV.shape[0]):
        logits = logits_RV[r]
        for i in range(logits.size):
            logits[i] = cap * tanh(logits[i] / cap)
