"""Log probabilities of prompt tokens, for requests that asked for them. T rows, H hidden size.

The token at position i is judged by the logits of the row at i - 1. A prompt may be long, so its
logits are made a few rows at a time; requests that did not ask pay nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attention_worker.batch import Batch, Schedule
from attention_worker.model import Model
from attention_worker.request_slots import RequestSlots
from expertmesh.v1 import attention_service_pb2 as pb
from expertmesh_kernels.sampling import top_logprobs

CHUNK_ROWS = 64
"""Most rows of logits in memory at a time."""


def prompt_logprobs(
    model: Model, h_TH: Tensor, schedule: Schedule, batch: Batch, slots: RequestSlots
) -> list[pb.PromptLogprobs]:
    """One message for each request that asked and had prompt tokens before the last one computed.

    Args:
        model: Makes logits of hidden states.
        h_TH: Hidden states after the last layer.
        schedule: What was computed.
        batch: Its rows.
        slots: Know prompts and who asked.
    """
    wanted_S = slots.num_prompt_logprobs_S[schedule.slots_S] >= 0
    if not wanted_S.any():
        return []
    ends_S = np.minimum(
        schedule.starts_S + schedule.num_tokens_S, slots.num_prompt_S[schedule.slots_S] - 1
    )
    asking = wanted_S & (ends_S > schedule.starts_S)
    messages = []
    for index in np.flatnonzero(asking).tolist():
        slot, start = int(schedule.slots_S[index]), int(schedule.starts_S[index])
        num_tokens, first = int(ends_S[index]) - start, int(schedule.first_rows_S[index])
        message = pb.PromptLogprobs(
            slot=slot,
            start=start + 1,
            num_tokens=num_tokens,
            num_top=int(slots.num_prompt_logprobs_S[slot]),
        )
        rows_N = batch.scheduled_rows_T[first : first + num_tokens]
        token_ids_N = slots.token_ids_SL[slot, start + 1 : start + 1 + num_tokens]
        _fill(message, model, h_TH, rows_N, token_ids_N.astype(np.int64))
        messages.append(message)
    return messages


def _fill(
    message: pb.PromptLogprobs,
    model: Model,
    h_TH: Tensor,
    rows_N: npt.NDArray[np.int64],
    token_ids_N: npt.NDArray[np.int64],
) -> None:
    logprobs, top_ids, top_values = [], [], []
    for at in range(0, len(rows_N), CHUNK_ROWS):
        chunk = slice(at, at + CHUNK_ROWS)
        with torch.inference_mode():
            logits_CV = model.logits(h_TH, rows_N[chunk]).cpu()
        own, ids, values = top_logprobs(logits_CV, token_ids_N[chunk], message.num_top)
        logprobs.append(own.astype("<f4").tobytes())
        top_ids.append(ids.astype("<i4").tobytes())
        top_values.append(values.astype("<f4").tobytes())
    message.logprobs = b"".join(logprobs)
    message.top_ids = b"".join(top_ids)
    message.top_logprobs = b"".join(top_values)
