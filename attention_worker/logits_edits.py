"""What requests change about their logits before a token is chosen. R rows, V vocabulary.

In this order: logit bias, penalties, bad words, allowed tokens, minimum of tokens, grammar. All of
it is a function of the request and of the tokens before the row, so that recomputation, retries
and abandoned steps need no care. Rows of requests that ask for nothing keep their bits.

Where these leave no token at all, a request still gets one, never one outside of its grammar:

    1. a token that ends the output, if the grammar allows one there;
    2. else what allowed tokens and grammar have in common: bad words and the minimum are dropped;
    3. else what the grammar allows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from attention_worker.batch import SampleRows
from attention_worker.request_slots import RequestSlots
from attention_worker.sampling_spec import SlotSampling
from expertmesh_kernels.logits import (
    Histories,
    add_bias,
    ban_sequences,
    ban_tokens,
    keep_only,
    penalize,
    token_bits,
)


def _no_rows() -> npt.NDArray[np.int64]:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class GrammarMasks:
    """Tokens that grammars allow at N of the rows, which ascend."""

    rows_N: npt.NDArray[np.int64] = field(default_factory=_no_rows)
    bits_NW: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty((0, 0), np.uint32))
    """As of `expertmesh_kernels.logits.token_bits`."""
    failures: tuple[tuple[int, str], ...] = ()
    """Rows that can get no token, and why."""

    def bits(self, row: int) -> npt.NDArray[np.uint32] | None:
        """The mask of a row, if it has one."""
        index = int(np.searchsorted(self.rows_N, row))
        found = index < len(self.rows_N) and self.rows_N[index] == row
        return self.bits_NW[index] if found else None


NO_MASKS = GrammarMasks()


def edit_logits(
    logits_RV: npt.NDArray[np.float32], rows: SampleRows, slots: RequestSlots, masks: GrammarMasks
) -> npt.NDArray[np.float32]:
    """Logits to choose from: a changed copy, or the same array if nobody asks for changes."""
    asking_N = np.flatnonzero(slots.edits_S[rows.slots_R])
    if not asking_N.size:
        return logits_RV
    edited_RV = logits_RV.copy()
    edits = _Edits(rows, slots, asking_N)
    edits.shift(edited_RV)
    edits.mask(edited_RV, masks)
    masked_N = np.array([row for row, sampling in edits.asking if sampling.masks], np.int64)
    for row in masked_N[edited_RV[masked_N].max(axis=1, initial=-np.inf) == -np.inf].tolist():
        one = _Edits(rows, slots, np.array([row]))
        edited_RV[row] = logits_RV[row]
        one.shift(edited_RV)
        _keep_some(edited_RV[row], slots.sampling_S[rows.slots_R[row]], masks.bits(row))
    return edited_RV


class _Edits:
    """Changes to the rows of requests that ask for some."""

    def __init__(
        self, rows: SampleRows, slots: RequestSlots, asking_N: npt.NDArray[np.int64]
    ) -> None:
        self._rows = rows
        self._slots = slots
        self.asking: list[tuple[int, SlotSampling]] = [
            (row, slots.sampling_S[slot])
            for row, slot in zip(asking_N.tolist(), rows.slots_R[asking_N].tolist(), strict=True)
        ]

    def shift(self, logits_RV: npt.NDArray[np.float32]) -> None:
        """Bias and penalties."""
        biased = [(row, sampling) for row, sampling in self.asking if sampling.bias_ids.size]
        if biased:
            ids = [sampling.bias_ids for _, sampling in biased]
            values = np.concatenate([sampling.bias_values for _, sampling in biased])
            add_bias(logits_RV, _repeated(biased, ids), np.concatenate(ids), values)
        penalized = [(row, sampling) for row, sampling in self.asking if sampling.penalizes]
        if penalized:
            rows_N = np.array([row for row, _ in penalized])
            penalize(
                logits_RV,
                rows_N,
                self._histories(rows_N),
                np.array([s.repetition_penalty for _, s in penalized], np.float32),
                np.array([s.presence_penalty for _, s in penalized], np.float32),
                np.array([s.frequency_penalty for _, s in penalized], np.float32),
            )

    def mask(self, logits_RV: npt.NDArray[np.float32], masks: GrammarMasks) -> None:
        """Tokens that are out of the question: -inf."""
        words = [(row, word) for row, sampling in self.asking for word in sampling.bad_words]
        if words:
            rows_N = np.array([row for row, _ in words])
            ban_sequences(logits_RV, rows_N, self._histories(rows_N), [word for _, word in words])
        allowed = [(r, s.allowed_bits) for r, s in self.asking if s.allowed_bits is not None]
        if allowed:
            keep_only(
                logits_RV, np.array([row for row, _ in allowed]), np.stack([b for _, b in allowed])
            )
        early = [(row, s) for row, s in self.asking if self._is_early(row, s)]
        if early:
            ids = [sampling.stop_ids for _, sampling in early]
            ban_tokens(logits_RV, _repeated(early, ids), np.concatenate(ids))
        if masks.rows_N.size:
            keep_only(logits_RV, masks.rows_N, masks.bits_NW)

    def _is_early(self, row: int, sampling: SlotSampling) -> bool:
        """True if stop tokens must wait for more tokens."""
        if not (sampling.min_tokens and sampling.stop_ids.size):
            return False
        num_prompt = self._slots.num_prompt_S[self._rows.slots_R[row]]
        return bool(self._rows.positions_R[row] - num_prompt < sampling.min_tokens)

    def _histories(self, rows_N: npt.NDArray[np.int64]) -> Histories:
        slots_N = self._rows.slots_R[rows_N]
        return Histories(
            self._slots.token_ids_SL,
            slots_N,
            self._slots.num_prompt_S[slots_N],
            self._rows.positions_R[rows_N],
        )


def _repeated(
    asking: list[tuple[int, SlotSampling]], ids: list[npt.NDArray[np.int64]]
) -> npt.NDArray[np.int64]:
    """The row of each id."""
    return np.repeat(np.array([row for row, _ in asking], np.int64), [len(own) for own in ids])


def _keep_some(
    logits_V: npt.NDArray[np.float32],
    sampling: SlotSampling,
    grammar_bits: npt.NDArray[np.uint32] | None,
) -> None:
    """Masks a row less strictly, so that a token is left; see the head of the file."""
    everything = np.full(-(-logits_V.size // 32), 0xFFFFFFFF, np.uint32)
    grammar = everything if grammar_bits is None else grammar_bits
    allowed = everything if sampling.allowed_bits is None else sampling.allowed_bits
    choices = (token_bits(sampling.stop_ids, logits_V.size) & grammar, allowed & grammar, grammar)
    kept = next((bits for bits in choices if bits.any()), everything)
    keep_only(logits_V[None], np.zeros(1, np.int64), kept[None])
