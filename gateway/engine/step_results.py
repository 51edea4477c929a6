"""Results of steps, checked against what was asked for before anything is committed.

The attention worker is our own program, but a token in the wrong place would be a wrong answer that
nobody sees. A result that does not fit its step means that both sides no longer agree on what is
where: the attention worker is started again, and the requests are computed again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from expertmesh.errors import PeerError
from expertmesh.v1 import attention_service_pb2 as pb
from gateway.engine.request_state import ScheduledEntry, ScheduledStep

_MAX_TOKEN_ID = 2**31 - 1


class _MismatchError(Exception):
    """What is wrong with a result; names the slot."""


_EXPECTED = frozenset(
    (
        pb.StepResponse.STATUS_DONE,
        pb.StepResponse.STATUS_PAUSED,
        pb.StepResponse.STATUS_FAILED,
        pb.StepResponse.STATUS_LETHAL,
    )
)


def check_result(step: ScheduledStep, response: pb.StepResponse) -> None:
    """Checks the result of a step whose predecessor was committed.

    Slots that were due a token and got none are not looked at: that concerns their requests alone.

    Args:
        step: What was asked for.
        response: What became of it.

    Raises:
        PeerError: The outcome is none that can be, or something was not asked for or is not whole;
            names slot and value.
    """
    if response.status not in _EXPECTED:
        raise PeerError(
            f"attention worker answered step {step.step} with the status {response.status}"
        )
    entries = {entry.slot: entry for entry in step.entries}
    try:
        if response.status == pb.StepResponse.STATUS_DONE:
            _check_done(entries, response)
        elif response.status == pb.StepResponse.STATUS_LETHAL:
            _check_slots(entries.keys(), response.suspect_slots, "lethal rows")
    except _MismatchError as error:
        raise PeerError(f"attention worker answered step {step.step} wrongly: {error}") from error


def _check_done(entries: dict[int, ScheduledEntry], response: pb.StepResponse) -> None:
    _check_tokens(entries, response)
    due = {slot for slot, entry in entries.items() if entry.sample}
    _check_slots(entries.keys(), response.nonfinite_slots, "logits that are not finite")
    _check_slots(entries.keys(), (item.slot for item in response.failures), "a failure")
    _check_slots(entries.keys(), response.degraded_slots, "experts left out")
    _check_slots(due, (item.slot for item in response.drafts), "drafts")
    _check_prompt_logprobs(entries, response)
    _check_routed_experts(entries, response)


def _check_slots(known: Iterable[int], slots: Iterable[int], what: str) -> None:
    """Each slot is known and comes once."""
    left = set(known)
    for slot in slots:
        if slot not in left:
            raise _MismatchError(f"slot {slot} has {what} that nobody asked for")
        left.discard(slot)


def _check_tokens(entries: dict[int, ScheduledEntry], response: pb.StepResponse) -> None:
    """One token for each sequence that is due one, and one more for each draft at most."""
    room = {slot: 1 + entry.num_drafts for slot, entry in entries.items() if entry.sample}
    for token in response.sampled:
        slot = token.slot
        if room.get(slot, 0) <= 0:
            raise _MismatchError(f"slot {slot} has token {token.token_id} that nobody asked for")
        room[slot] -= 1
        if token.token_id > _MAX_TOKEN_ID:
            raise _MismatchError(f"slot {slot} has token {token.token_id}, which is no token id")
        _check_logprobs(token, entries[slot].state.request.params.num_logprobs)


def _check_logprobs(token: pb.SampledToken, num_asked: int | None) -> None:
    found = token.HasField("logprob")
    if found != (num_asked is not None):
        words = "a log probability that nobody asked for" if found else "no log probability"
        raise _MismatchError(f"slot {token.slot} has {words}")
    if len(token.top_logprobs) > (num_asked or 0):
        raise _MismatchError(f"slot {token.slot} has {len(token.top_logprobs)} candidates")


def _check_prompt_logprobs(entries: dict[int, ScheduledEntry], response: pb.StepResponse) -> None:
    """All that a step computed of the prompts of those who asked."""
    asking = {slot: most for slot, entry in entries.items() if (most := _num_judged(entry))}
    pieces = response.prompt_logprobs
    slots = [piece.slot for piece in pieces]
    _check_all(entries, asking.keys(), slots, "log probabilities of its prompt")
    for piece in pieces:
        start, most = entries[piece.slot].start + 1, asking[piece.slot]
        if (piece.start, piece.num_tokens) != (start, most):
            raise _MismatchError(
                f"slot {piece.slot} has log probabilities of {piece.num_tokens} tokens from "
                f"{piece.start} on, expected {most} from {start} on"
            )
        sizes = [len(piece.logprobs), len(piece.top_ids), len(piece.top_logprobs)]
        top_size = 4 * piece.num_tokens * piece.num_top
        expected = [4 * piece.num_tokens, top_size, top_size]
        if sizes != expected:
            raise _MismatchError(
                f"slot {piece.slot} has log probabilities in {sizes} bytes, expected {expected}"
            )


def _num_judged(entry: ScheduledEntry) -> int:
    """Prompt tokens whose log probabilities a request gets from a step."""
    if entry.state.request.params.num_prompt_logprobs is None:
        return 0
    last = entry.state.num_prompt_tokens - 1
    return max(0, min(entry.start + entry.num_tokens, last) - entry.start)


def _check_routed_experts(entries: dict[int, ScheduledEntry], response: pb.StepResponse) -> None:
    """All that a step computed of those who asked; drafts that were wrong do not count."""
    asking = [
        slot for slot, entry in entries.items() if entry.state.request.params.return_routed_experts
    ]
    pieces = response.routed_experts
    _check_all(entries, asking, [piece.slot for piece in pieces], "experts")
    for piece in pieces:
        entry = entries[piece.slot]
        fewest = entry.num_tokens - entry.num_drafts
        if piece.start != entry.start or not fewest <= piece.num_tokens <= entry.num_tokens:
            raise _MismatchError(
                f"slot {piece.slot} has experts of {piece.num_tokens} tokens from {piece.start} "
                f"on, expected {entry.num_tokens} from {entry.start} on"
            )
        size = 2 * piece.num_tokens * piece.num_layers * piece.top_k
        if len(piece.expert_ids) != size:
            raise _MismatchError(
                f"slot {piece.slot} has experts in {len(piece.expert_ids)} bytes, expected {size}"
            )


def _check_all(
    entries: dict[int, ScheduledEntry], asking: Collection[int], slots: Collection[int], what: str
) -> None:
    """Each slot that asked comes once, and no other; one that has ended since may be left out."""
    _check_slots(asking, slots, what)
    for slot in asking:
        if slot not in slots and entries[slot].current:
            raise _MismatchError(f"slot {slot} has no {what}")
