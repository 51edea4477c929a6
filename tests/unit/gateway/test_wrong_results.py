"""Results of an attention worker that do not fit their step: none is ever part of an answer.

Each is noticed before anything of it is committed; the attention worker is started again, and the
requests get the tokens that they would have got.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable

import pytest

from expertmesh.errors import EngineError, PeerError
from expertmesh.settings import EngineSettings
from expertmesh.v1 import attention_service_pb2 as pb
from gateway.engine.request_state import RequestState, ScheduledEntry, ScheduledStep
from gateway.engine.step_results import check_result
from gateway.sequence import FinishReason, GenerationRequest, SamplingParams
from tests.support.engine_bench import IDLE, Bench, running
from tests.support.strict_attention import continuation

Spoiler = Callable[[pb.StepResponse], object]

PROMPT = tuple(range(6))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """An engine with two steps in flight."""
    async for made in running(EngineSettings(step_timeout_s=5)):
        yield made


def _piece(response: pb.StepResponse) -> pb.PromptLogprobs:
    return response.prompt_logprobs.add(slot=0, start=1, num_tokens=1, logprobs=bytes(4))


def _experts(response: pb.StepResponse) -> pb.RoutedExperts:
    return response.routed_experts.add(
        slot=0, start=0, num_tokens=1, num_layers=1, top_k=1, expert_ids=bytes(2)
    )


def _status(status: int) -> Spoiler:
    """Proto enums are open: any number may come."""
    wire = b"\x10" + bytes([status])
    return lambda response: response.MergeFromString(wire)


WRONG: dict[str, tuple[Spoiler, str]] = {
    "a token too many": (lambda r: r.sampled.extend(r.sampled[:1]), "slot 0 has token"),
    "a token for a slot out of range": (
        lambda r: r.sampled.extend([pb.SampledToken(slot=4_000_000_000, token_id=3)]),
        "slot 4000000000 has token 3 that nobody asked for",
    ),
    "a token for a free slot": (
        lambda r: r.sampled.extend([pb.SampledToken(slot=3, token_id=3)]),
        "slot 3 has token 3 that nobody asked for",
    ),
    "no token id": (lambda r: setattr(r.sampled[0], "token_id", 2**32 - 1), "no token id"),
    "a log probability too many": (lambda r: setattr(r.sampled[0], "logprob", -1.0), "nobody"),
    "candidates too many": (lambda r: r.sampled[0].top_logprobs.add(token_id=1), "1 candidates"),
    "drafts of nobody": (lambda r: r.drafts.add(slot=2, num_drafts=1), "slot 2 has drafts"),
    "drafts twice": (
        lambda r: r.drafts.extend([pb.SlotDrafts(slot=0, num_drafts=1)] * 2),
        "slot 0 has drafts",
    ),
    "no finite logits of nobody": (lambda r: r.nonfinite_slots.append(9), "slot 9 has logits"),
    "a failure of nobody": (lambda r: r.failures.add(slot=7, message="x"), "slot 7 has a failure"),
    "prompt of nobody": (_piece, "slot 0 has log probabilities of its prompt"),
    "experts of nobody": (_experts, "slot 0 has experts"),
    "lethal rows of nobody": (
        lambda r: r.MergeFrom(
            pb.StepResponse(status=pb.StepResponse.STATUS_LETHAL, suspect_slots=[9])
        ),
        "slot 9 has lethal rows",
    ),
    "skipped": (_status(pb.StepResponse.STATUS_SKIPPED), "with the status 4"),
    "an unknown status": (_status(77), "with the status 77"),
    "another step": (lambda r: setattr(r, "step", r.step + 1), "answered step"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_result_changes_no_answer(bench: Bench, name: str) -> None:
    """It is refused by name; all requests are computed again, and get the same tokens."""
    spoil, message = WRONG[name]
    bench.port.spoil_result(3, spoil)
    answers = [bench.ask(f"r{index}", PROMPT[index:], max_tokens=9) for index in range(2)]
    for index, answer in enumerate(answers):
        assert (await answer.end()).finish_reason is FinishReason.LENGTH
        assert answer.token_ids == continuation(PROMPT[index:], 9)
    assert len(bench.port.restarts) == 1
    assert message in bench.port.restarts[0]
    await bench.until(IDLE)


async def test_results_that_stay_wrong_end_their_requests(bench: Bench) -> None:
    """Not for ever: after some lives of the attention worker the requests in it end."""
    bench.port.spoil_result(None, WRONG["a token too many"][0])
    error = (await bench.ask("a", PROMPT).end()).error
    assert isinstance(error, EngineError)
    assert "lost 3 times" in str(error)
    bench.port.spoil_result(None, lambda response: None)
    await bench.until_ready(True)
    assert (await bench.ask("b", PROMPT).end()).finish_reason is FinishReason.LENGTH


def _prompt_logprobs(response: pb.StepResponse) -> None:
    """What a request with a prompt of 6 tokens is due, in one step."""
    response.prompt_logprobs.add(
        slot=0, start=1, num_tokens=5, num_top=1, logprobs=struct.pack("<5f", *[-1.0] * 5),
        top_ids=bytes(20), top_logprobs=bytes(20),
    )  # fmt: skip


def _first(response: pb.StepResponse) -> pb.PromptLogprobs:
    _prompt_logprobs(response)
    return response.prompt_logprobs[0]


WRONG_RECORDS: dict[str, tuple[Spoiler, str]] = {
    "none": (lambda r: None, "slot 0 has no log probabilities of its prompt"),
    "too few": (lambda r: setattr(_first(r), "num_tokens", 4), "of 4 tokens from 1 on, expected 5"),
    "elsewhere": (lambda r: setattr(_first(r), "start", 0), "from 0 on, expected 5 from 1 on"),
    "far away": (lambda r: setattr(_first(r), "start", 2**32 - 1), "from 4294967295 on"),
    "short": (lambda r: setattr(_first(r), "logprobs", bytes(19)), "in [19, 20, 20] bytes"),
    "no candidates": (lambda r: setattr(_first(r), "top_ids", b""), "in [20, 0, 20] bytes"),
    "huge": (lambda r: setattr(_first(r), "num_top", 2**32 - 1), "bytes, expected"),
    "twice": (lambda r: (_prompt_logprobs(r), _prompt_logprobs(r)), "nobody asked for"),
}


@pytest.mark.parametrize("name", WRONG_RECORDS)
async def test_wrong_records_of_a_prompt_are_not_shown(bench: Bench, name: str) -> None:
    """Whatever their sizes say: the prompt is computed again, and its records are whole."""
    spoil, message = WRONG_RECORDS[name]
    bench.port.spoil_result(None, _prompt_logprobs)
    bench.port.spoil_result(1, spoil)
    answer = bench.ask("a", PROMPT, max_tokens=1, num_prompt_logprobs=1)
    await answer.end()
    assert message in bench.port.restarts[0]
    records = answer.outputs[0].prompt_logprobs
    assert records is not None
    assert [record and record.logprob for record in records] == [None, *[-1.0] * 5]


@pytest.mark.parametrize("max_tokens", [1, 4])
async def test_records_without_numbers_end_their_request_alone(
    bench: Bench, max_tokens: int
) -> None:
    """The model is at fault: to compute it again would give the same."""

    def spoil(response: pb.StepResponse) -> None:
        _first(response).logprobs = struct.pack("<5f", *[float("nan")] * 5)

    bench.port.spoil_result(1, spoil)
    answer = bench.ask("a", PROMPT, max_tokens, num_prompt_logprobs=1)
    error = (await answer.end()).error
    assert isinstance(error, EngineError)
    assert "not a finite number" in str(error)
    assert (await bench.ask("b", PROMPT).end()).finish_reason is FinishReason.LENGTH
    assert bench.port.restarts == []


def test_what_ended_meanwhile_may_be_left_out() -> None:
    """A step that was sent ahead has work of a request that has ended: nothing is due for it."""
    params = SamplingParams(max_tokens=4, num_prompt_logprobs=0, return_routed_experts=True)
    request = GenerationRequest("a", PROMPT, params, lambda output: None, 0.0)
    state = RequestState(request)
    state.slot, state.life = 2, 1
    entry = ScheduledEntry(state, 1, 2, 0, len(PROMPT), (0, 1), sample=True)
    step = ScheduledStep(5, (), (), (entry,))
    response = pb.StepResponse(step=5, status=pb.StepResponse.STATUS_DONE)
    with pytest.raises(PeerError, match="slot 2 has no log probabilities"):
        check_result(step, response)
    state.slot = None
    check_result(step, response)
