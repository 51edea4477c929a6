"""Changes to logits before a token is chosen, in place, on the host. R rows, V vocabulary.

An op changes only the rows that it is told of. Where it depends on earlier tokens, it reads them
from a table [S, L] with one row per sequence: the tokens before `ends`, of which those before
`num_prompt` are the prompt. So it has no state, and a repeated step changes logits alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh_kernels.cpu import logits as cpu
from expertmesh_kernels.host import as_array, as_input

BITS = 32
"""Tokens per word of a bit mask."""


@dataclass(frozen=True)
class Histories:
    """Tokens before each of N rows."""

    token_ids_SL: NDArray[np.int32]
    slots_N: NDArray[np.int64]
    """Row of the table."""
    num_prompt_N: NDArray[np.int64]
    ends_N: NDArray[np.int64]


def add_bias(
    logits_RV: NDArray[np.float32],
    rows_N: NDArray[np.int64],
    ids_N: NDArray[np.int64],
    bias_N: NDArray[np.float32],
) -> None:
    """Adds a bias to single logits; several of one logit add up."""
    cpu.add_bias(
        logits_RV, as_input(rows_N, np.int64), as_input(ids_N, np.int64),
        as_input(bias_N, np.float32),
    )  # fmt: skip


def penalize(
    logits_RV: NDArray[np.float32],
    rows_N: NDArray[np.int64],
    histories: Histories,
    repetition_N: NDArray[np.float32],
    presence_N: NDArray[np.float32],
    frequency_N: NDArray[np.float32],
) -> None:
    """Penalties of tokens that are there already.

    A logit of a token in prompt or output is divided by the repetition penalty if it is positive,
    else multiplied. From one of a generated token the frequency penalty times the token's number,
    and then the presence penalty, are subtracted.

    Args:
        logits_RV: Changed in place.
        rows_N: Rows to change.
        histories: Their tokens.
        repetition_N: Positive; 1 for none.
        presence_N: 0 for none.
        frequency_N: 0 for none.
    """
    cpu.penalize(
        logits_RV, as_input(rows_N, np.int64), histories.token_ids_SL,
        as_input(histories.slots_N, np.int64), as_input(histories.num_prompt_N, np.int64),
        as_input(histories.ends_N, np.int64), as_input(repetition_N, np.float32),
        as_input(presence_N, np.float32), as_input(frequency_N, np.float32),
    )  # fmt: skip


def ban_sequences(
    logits_RV: NDArray[np.float32],
    rows_N: NDArray[np.int64],
    histories: Histories,
    sequences_N: list[NDArray[np.int64]],
) -> None:
    """No sequence occurs among generated tokens: -inf for its last token after the others.

    Args:
        logits_RV: Changed in place.
        rows_N: Row of each sequence; a row may come several times.
        histories: Its tokens; only the generated ones count.
        sequences_N: Token ids, at least one each.
    """
    offsets = np.cumsum([0, *(len(sequence) for sequence in sequences_N)])
    cpu.ban_sequences(
        logits_RV, as_input(rows_N, np.int64), histories.token_ids_SL,
        as_input(histories.slots_N, np.int64), as_input(histories.num_prompt_N, np.int64),
        as_input(histories.ends_N, np.int64), as_input(np.concatenate(sequences_N), np.int64),
        as_input(offsets, np.int64),
    )  # fmt: skip


def ban_tokens(
    logits_RV: NDArray[np.float32], rows_N: NDArray[np.int64], ids_N: NDArray[np.int64]
) -> None:
    """-inf for single logits."""
    logits_RV[rows_N, ids_N] = -np.inf


def keep_only(
    logits_RV: NDArray[np.float32], rows_N: NDArray[np.int64], bits_NW: NDArray[np.uint32]
) -> None:
    """-inf for every token that is not in a row's bit mask.

    Args:
        logits_RV: Changed in place.
        rows_N: Rows to change.
        bits_NW: Of `token_bits`: ceil(V / 32) words.
    """
    cpu.keep_only(logits_RV, as_input(rows_N, np.int64), as_input(bits_NW, np.uint32))


def token_bits(ids_N: NDArray[np.int64], vocab_size: int) -> NDArray[np.uint32]:
    """A bit mask [ceil(V / 32)] with these tokens: bit i of word w is token 32 w + i."""
    flags = np.zeros(-(-vocab_size // BITS) * BITS, np.uint8)
    flags[ids_N] = 1
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)


def penalize_reference(
    logits_RV: NDArray[np.float32],
    rows_N: NDArray[np.int64],
    histories: Histories,
    repetition_N: NDArray[np.float32],
    presence_N: NDArray[np.float32],
    frequency_N: NDArray[np.float32],
) -> None:
    """What `penalize` computes, in NumPy over the whole vocabulary."""
    vocab_size = logits_RV.shape[1]
    for n, row in enumerate(rows_N):
        tokens = histories.token_ids_SL[histories.slots_N[n], : histories.ends_N[n]]
        counts = np.bincount(tokens[histories.num_prompt_N[n] :], minlength=vocab_size)
        counts_V = counts.astype(np.float32)
        seen_V = np.bincount(tokens, minlength=vocab_size) > 0
        logits_V = logits_RV[row]
        scaled_V = np.where(
            logits_V > 0, logits_V / repetition_N[n], logits_V * repetition_N[n]
        ).astype(np.float32)
        repeated_V = np.where(seen_V, scaled_V, logits_V)
        frequent_V = repeated_V - frequency_N[n] * counts_V
        logits_RV[row] = frequent_V - presence_N[n] * (counts_V > 0).astype(np.float32)


def ban_sequences_reference(
    logits_RV: NDArray[np.float32],
    rows_N: NDArray[np.int64],
    histories: Histories,
    sequences_N: list[NDArray[np.int64]],
) -> None:
    """What `ban_sequences` computes, with Python lists."""
    for n, (row, sequence) in enumerate(zip(rows_N, sequences_N, strict=True)):
        span = slice(histories.num_prompt_N[n], histories.ends_N[n])
        generated = histories.token_ids_SL[histories.slots_N[n], span].tolist()
        *before, last = sequence.tolist()
        if not before or generated[-len(before) :] == before:
            logits_RV[row, last] = -np.inf


def keep_only_reference(
    logits_RV: NDArray[np.float32], rows_N: NDArray[np.int64], bits_NW: NDArray[np.uint32]
) -> None:
    """What `keep_only` computes, in NumPy."""
    flags_NV = np.unpackbits(bits_NW.astype("<u4").view(np.uint8), axis=1, bitorder="little")
    kept_NV = flags_NV[:, : logits_RV.shape[1]] > 0
    logits_RV[rows_N] = np.where(kept_NV, logits_RV[rows_N], np.float32(-np.inf))


def softcap_(logits_RV: Tensor, cap: float) -> None:
    """logits = cap * tanh(logits / cap), in place; contiguous float32, on any device."""
    if logits_RV.dtype != torch.float32 or not logits_RV.is_contiguous():
        raise ValueError(f"logits are {logits_RV.dtype}, expected contiguous float32")
    if logits_RV.device.type != "cpu":
        logits_RV.div_(cap).tanh_().mul_(cap)
        return
    cpu.softcap(as_array(logits_RV), np.float32(cap))
