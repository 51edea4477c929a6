"""From logits to tokens, for all sequences of a step at once. R rows, P sequences, V vocabulary.

The noise of a token is a function of (seed, position of the token, token id): it does not depend
on the batch, on chunks, on preemption or on retries, and there is no generator state to commit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attention_worker.batch import SampleRows
from attention_worker.logits_edits import GrammarMasks, edit_logits
from attention_worker.request_slots import RequestSlots
from expertmesh.v1 import attention_service_pb2 as pb
from expertmesh_kernels.host import as_array
from expertmesh_kernels.sampling import finite_rows, sample, top_logprobs


@dataclass(frozen=True)
class ChosenTokens:
    """What was sampled from the rows of a step, and what of it counts."""

    rows: SampleRows
    token_ids_R: npt.NDArray[np.int64]
    num_emitted_P: npt.NDArray[np.int64]
    """Leading rows of each sequence that give a token; 0 if something is wrong with the first."""
    finite_R: npt.NDArray[np.bool_]
    failures: tuple[tuple[int, str], ...]
    """Rows whose grammar failed."""

    @property
    def num_rejected_P(self) -> npt.NDArray[np.int64]:
        """Drafts of each sequence that were not what was sampled."""
        return self.rows.num_rows_P - np.maximum(self.num_emitted_P, 1)

    def report(self, response: pb.StepResponse, logits_RV: Tensor, slots: RequestSlots) -> None:
        """Adds tokens and failed requests."""
        emitted_N = self.rows.leading(self.num_emitted_P)
        response.sampled.extend(
            sampled_messages(logits_RV, self.rows, self.token_ids_R, emitted_N, slots)
        )
        nonfinite_P = (self.num_emitted_P == 0) & ~self.finite_R[self.rows.first_P]
        response.nonfinite_slots.extend(self.rows.slots_P[nonfinite_P].tolist())
        first_rows = set(self.rows.first_P[~nonfinite_P].tolist())
        response.failures.extend(
            pb.SlotFailure(slot=int(self.rows.slots_R[row]), message=message)
            for row, message in self.failures
            if row in first_rows
        )
        num_drafts = len(self.rows) - len(self.rows.first_P)
        response.num_drafts_verified = num_drafts
        response.num_drafts_accepted = num_drafts - int(self.num_rejected_P.sum())

    def commit(self, slots: RequestSlots) -> None:
        """Appends the tokens to their requests; those that get none have ended."""
        slots.ended_S[self.rows.slots_P[self.num_emitted_P == 0]] = True
        emitted_N = self.rows.leading(self.num_emitted_P)
        slots.commit_sampled(
            self.rows.slots_R[emitted_N],
            self.rows.positions_R[emitted_N],
            self.token_ids_R[emitted_N],
        )


def no_tokens(rows: SampleRows) -> ChosenTokens:
    """What is chosen where there are no rows."""
    nothing = np.empty(0, np.int64)
    return ChosenTokens(rows, nothing, nothing, np.empty(0, np.bool_), ())


def choose_tokens(
    logits_RV: Tensor, rows: SampleRows, slots: RequestSlots, masks: GrammarMasks
) -> ChosenTokens:
    """Samples from every row, and counts the tokens that one row per step would give.

    Args:
        logits_RV: float32, on the host; not changed.
        rows: At least one.
        slots: Know how, and hold tokens and drafts; not changed.
        masks: Of requests with grammars.
    """
    token_ids_R = sample_tokens(logits_RV, rows, slots, masks)
    finite_R = finite_rows(logits_RV)
    usable_R = finite_R.copy()
    usable_R[[row for row, _ in masks.failures]] = False
    num_emitted_P = count_emitted(rows, token_ids_R, usable_R, slots)
    return ChosenTokens(rows, token_ids_R, num_emitted_P, finite_R, masks.failures)


def sample_tokens(
    logits_RV: Tensor, rows: SampleRows, slots: RequestSlots, masks: GrammarMasks
) -> npt.NDArray[np.int64]:
    """A token id for each row, [R]. Logits are float32 on the host; they stay as they are."""
    edited_RV = edit_logits(as_array(logits_RV), rows, slots, masks)
    slots_R = rows.slots_R
    return sample(
        torch.from_numpy(edited_RV),
        slots.temperature_S[slots_R],
        slots.min_p_S[slots_R],
        slots.top_p_S[slots_R],
        slots.top_k_S[slots_R],
        slots.seed_S[slots_R],
        rows.positions_R,
    )


def count_emitted(
    rows: SampleRows,
    token_ids_R: npt.NDArray[np.int64],
    usable_R: npt.NDArray[np.bool_],
    slots: RequestSlots,
) -> npt.NDArray[np.int64]:
    """How many leading rows of each sequence give a token, [P]; 0 if the first is not usable.

    A row counts if all before it do and each of them sampled the draft that the next one builds
    on, and no token that ends the output: so the tokens are those that one row per step gives.

    Args:
        rows: What was sampled from.
        token_ids_R: What was sampled.
        usable_R: False where there is no good token.
        slots: Hold the drafts.
    """
    num_rows = len(rows)
    goes_on_R = token_ids_R == slots.token_ids_SL[rows.slots_R, _in_table(rows, slots)]
    goes_on_R[:-1] &= usable_R[1:]
    goes_on_R[rows.first_P[1:] - 1] = False
    goes_on_R[-1] = False
    for row in np.flatnonzero(goes_on_R).tolist():
        stop_ids = slots.sampling_S[rows.slots_R[row]].stop_ids
        goes_on_R[row] = token_ids_R[row] not in stop_ids
    end_R = np.where(goes_on_R, num_rows, np.arange(num_rows))
    emitted_P = np.minimum.reduceat(end_R, rows.first_P) - rows.first_P + 1
    return np.where(usable_R[rows.first_P], emitted_P, 0)


def _in_table(rows: SampleRows, slots: RequestSlots) -> npt.NDArray[np.int64]:
    """Positions of the sampled tokens; the last possible one has no draft to compare with."""
    return np.minimum(rows.positions_R, slots.max_model_len - 1)


def sampled_messages(
    logits_RV: Tensor,
    rows: SampleRows,
    token_ids_R: npt.NDArray[np.int64],
    emitted_N: npt.NDArray[np.int64],
    slots: RequestSlots,
) -> list[pb.SampledToken]:
    """One message per emitted row, with log probabilities for requests that asked for them.

    They are those of the logits as the model gave them.
    """
    slots_N, token_ids_N = rows.slots_R[emitted_N], token_ids_R[emitted_N]
    messages = [
        pb.SampledToken(slot=slot, token_id=token_id)
        for slot, token_id in zip(slots_N.tolist(), token_ids_N.tolist(), strict=True)
    ]
    wanted_N = slots.num_logprobs_S[slots_N]
    asking = np.flatnonzero(wanted_N >= 0)
    if asking.size:
        logits_AV = logits_RV[emitted_N[asking].tolist()]
        chosen = [messages[index] for index in asking.tolist()]
        _add_logprobs(chosen, logits_AV, token_ids_N[asking], wanted_N[asking])
    return messages


def _add_logprobs(
    messages: list[pb.SampledToken],
    logits_AV: Tensor,
    token_ids_A: npt.NDArray[np.int64],
    wanted_A: npt.NDArray[np.int64],
) -> None:
    """Fills in log probabilities, all rows with one call."""
    chosen_A, top_ids, top_values = top_logprobs(logits_AV, token_ids_A, int(wanted_A.max()))
    for index, (message, num) in enumerate(zip(messages, wanted_A.tolist(), strict=True)):
        message.logprob = float(chosen_A[index])
        message.top_logprobs.extend(
            pb.TokenLogprob(token_id=token_id, logprob=logprob)
            for token_id, logprob in zip(
                top_ids[index, :num].tolist(), top_values[index, :num].tolist(), strict=True
            )
        )
