"""Grammars of requests: which tokens they allow, found while the forward pass runs.

Threads: the one that runs the steps calls; one thread of its own, `grammar`, has all matchers. A
job of that thread carries the tokens it needs, so it reads no table of the other thread. Matchers
are memory only: a job first follows the committed tokens that are new to it, and takes back the
drafts that it followed. So a step that is abandoned changes nothing, and a request that is
admitted anew starts from its generated tokens.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

from attention_worker.batch import SampleRows
from attention_worker.grammar_matcher import GrammarError, GrammarMatcher
from attention_worker.logits_edits import NO_MASKS, GrammarMasks
from attention_worker.request_slots import RequestSlots
from attention_worker.sampling_spec import SlotSampling
from expertmesh.deep_stack import DeepStackPool

MASK_TIMEOUT_S = 60.0
"""Longest wait for the masks of a step; llguidance limits its own work to far less."""


class PendingMasks(Protocol):
    """Masks that are being made."""

    def result(self) -> GrammarMasks:
        """The masks; waits for them."""
        ...


class _Ready:
    """No masks to wait for."""

    def result(self) -> GrammarMasks:
        """No masks."""
        return NO_MASKS


@dataclass(frozen=True)
class _Waiting:
    """Masks that the thread makes."""

    future: Future[GrammarMasks]

    def result(self) -> GrammarMasks:
        """The masks; raises TimeoutError if the thread is stuck."""
        return self.future.result(MASK_TIMEOUT_S)


@dataclass(frozen=True)
class _Job:
    """A request with a grammar in one step."""

    slot: int
    admission: int
    sampling: SlotSampling
    generated: npt.NDArray[np.int32]
    drafts: list[int]
    first_row: int
    """-1 if it gets no token in this step."""

    @property
    def key(self) -> tuple[int, int]:
        """Tells requests apart."""
        return self.slot, self.admission


class GrammarMasker:
    """Makes masks with llguidance.

    Args:
        tokenizer_path: `tokenizer.json`, read by `prepare` or for the first grammar; None if there
            is none.
        eos_token_ids: Tokens that end the model's output.
        vocab_size: Of the model.
    """

    def __init__(
        self, tokenizer_path: Path | None, eos_token_ids: tuple[int, ...], vocab_size: int
    ) -> None:
        self._tokenizer_path = tokenizer_path
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._matchers: dict[tuple[int, int], GrammarMatcher] = {}
        self._pool = DeepStackPool(1, thread_name_prefix="grammar")
        self._idle = True

    def prepare(self) -> None:
        """Begins to load the tokenizer, so that the step of the first grammar need not wait."""
        if self._tokenizer_path is not None:
            self._pool.submit(self._loaded_tokenizer)  # what is wrong with it is told at its use

    def start(self, rows: SampleRows, slots: RequestSlots) -> PendingMasks:
        """Begins to make the masks of the rows.

        Grammars of requests that get no token yet are compiled too.
        """
        jobs = _jobs(rows, slots)
        if not jobs and self._idle:
            return _Ready()
        self._idle = not jobs
        return _Waiting(self._pool.submit(self._make, jobs))

    def close(self) -> None:
        """Ends the thread after the job in hand."""
        self._pool.shutdown(cancel_futures=True)

    # --- the thread `grammar` ---

    def _make(self, jobs: list[_Job]) -> GrammarMasks:
        known = {job.key for job in jobs}
        self._matchers = {key: own for key, own in self._matchers.items() if key in known}
        masks: list[tuple[int, npt.NDArray[np.uint32]]] = []
        failures: list[tuple[int, str]] = []
        for job in sorted(jobs, key=lambda job: job.first_row):
            first = len(masks)
            try:
                self._add_masks(job, masks)
            except GrammarError as error:
                self._matchers.pop(job.key, None)  # of no use after an error: made anew next time
                failures.append((job.first_row + len(masks) - first, f"grammar: {error}"))
        return _masks_of(masks, [failure for failure in failures if failure[0] >= 0])

    def _add_masks(self, job: _Job, masks: list[tuple[int, npt.NDArray[np.uint32]]]) -> None:
        """Adds row and mask for the next token, and for the one after each allowed draft."""
        matcher = self._matcher(job)
        if job.first_row < 0:
            return
        matcher.advance(job.generated)
        masks.append((job.first_row, matcher.allowed()))
        for row, draft in enumerate(job.drafts, job.first_row + 1):
            if not matcher.try_draft(draft):
                break  # no token is taken from the rows that build on it
            masks.append((row, matcher.allowed()))
        matcher.take_back()

    def _matcher(self, job: _Job) -> GrammarMatcher:
        if job.key not in self._matchers:
            self._matchers[job.key] = GrammarMatcher(
                self._loaded_tokenizer(),
                job.sampling.grammar,
                job.sampling.stop_ids,
                self._vocab_size,
            )
        return self._matchers[job.key]

    def _loaded_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            if self._tokenizer_path is None:
                raise GrammarError("the model has no tokenizer.json")
            try:
                text = self._tokenizer_path.read_text("utf-8")
                self._tokenizer = LLTokenizer(text, eos_token=list(self._eos_token_ids) or None)
            except (OSError, ValueError) as error:
                raise GrammarError(f"{self._tokenizer_path} cannot be used: {error}") from error
        return self._tokenizer


def _jobs(rows: SampleRows, slots: RequestSlots) -> list[_Job]:
    """One for each request with a grammar."""
    first_row = dict(zip(rows.slots_P.tolist(), rows.first_P.tolist(), strict=True))
    num_rows = dict(zip(rows.slots_P.tolist(), rows.num_rows_P.tolist(), strict=True))
    jobs = []
    for slot in np.flatnonzero(slots.grammar_S & slots.in_use_S).tolist():
        length = int(slots.length_S[slot])
        end = length + num_rows.get(slot, 1) - 1
        tokens_L = slots.token_ids_SL[slot]
        jobs.append(
            _Job(
                slot=slot,
                admission=int(slots.admission_S[slot]),
                sampling=slots.sampling_S[slot],
                generated=tokens_L[slots.num_prompt_S[slot] : length].copy(),
                drafts=tokens_L[length:end].tolist(),
                first_row=first_row.get(slot, -1),
            )
        )
    return jobs


def _masks_of(
    masks: list[tuple[int, npt.NDArray[np.uint32]]], failures: list[tuple[int, str]]
) -> GrammarMasks:
    if not masks:
        return GrammarMasks(failures=tuple(failures))
    rows_N = np.array([row for row, _ in masks], np.int64)
    return GrammarMasks(rows_N, np.stack([bits for _, bits in masks]), tuple(failures))
