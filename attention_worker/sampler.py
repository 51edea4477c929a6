"""From logits to tokens, for all sequences of a step at once. P sequences, V vocabulary.

The noise of a token is a function of (seed, position of the token, token id): it does not depend
on the batch, on chunks, on preemption or on retries, and there is no generator state to commit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attention_worker.request_slots import RequestSlots
from expertmesh.v1 import attention_service_pb2 as pb
from expertmesh_kernels.sampling import sample, top_logprobs


def sample_tokens(
    logits_PV: Tensor,
    slots_P: npt.NDArray[np.int64],
    positions_P: npt.NDArray[np.int64],
    slots: RequestSlots,
) -> npt.NDArray[np.int64]:
    """Token ids, [P]. Logits are float32 and finite."""
    return sample(
        logits_PV,
        slots.temperature_S[slots_P],
        slots.top_p_S[slots_P],
        slots.top_k_S[slots_P],
        slots.seed_S[slots_P],
        positions_P,
    )


def sampled_messages(
    logits_PV: Tensor,
    slots_P: npt.NDArray[np.int64],
    token_ids_P: npt.NDArray[np.int64],
    slots: RequestSlots,
) -> list[pb.SampledToken]:
    """One message per sampled token, with log probabilities for requests that asked for them."""
    messages = [
        pb.SampledToken(slot=slot, token_id=token_id)
        for slot, token_id in zip(slots_P.tolist(), token_ids_P.tolist(), strict=True)
    ]
    wanted_P = slots.num_logprobs_S[slots_P]
    asking = np.flatnonzero(wanted_P >= 0)
    if asking.size:
        _add_logprobs(messages, logits_PV, token_ids_P, wanted_P, asking)
    return messages


def _add_logprobs(
    messages: list[pb.SampledToken],
    logits_PV: Tensor,
    token_ids_P: npt.NDArray[np.int64],
    wanted_P: npt.NDArray[np.int64],
    asking: npt.NDArray[np.int64],
) -> None:
    """Fills in log probabilities of the rows in `asking`, all rows with one call."""
    chosen, top_ids, top_values = top_logprobs(
        logits_PV[asking.tolist()], token_ids_P[asking], int(wanted_P[asking].max())
    )
    for index, row in enumerate(asking.tolist()):
        num = int(wanted_P[row])
        message = messages[row]
        message.logprob = float(chosen[index])
        message.top_logprobs.extend(
            pb.TokenLogprob(token_id=token_id, logprob=logprob)
            for token_id, logprob in zip(
                top_ids[index, :num].tolist(), top_values[index, :num].tolist(), strict=True
            )
        )
