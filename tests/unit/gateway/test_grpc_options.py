"""Every option of Generate: what the engine gets, what comes back, what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import numpy as np
import pytest

from expertmesh.errors import DeadlineError
from expertmesh.v1 import generation_service_pb2 as pb
from gateway.sequence import FinishReason
from tests.support.grpc_calls import Served, serving
from tests.support.scripted_engine import CONTEXT, VOCAB_SIZE


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """A server whose model has a tokenizer."""
    async with serving() as running:
        yield running


async def test_options_reach_the_engine(served: Served) -> None:
    """As those of the HTTP API do."""
    await served.generate(
        prompt="hello",
        sampling=pb.SamplingOptions(
            min_p=0.25,
            repetition_penalty=1.5,
            presence_penalty=-2,
            frequency_penalty=2,
            logit_bias={7: -100, 3: 1.5},
            allowed_token_ids=[9, 7, 9],
            bad_words=["ab"],
        ),
        stopping=pb.StoppingOptions(
            max_tokens=5, min_tokens=2, stop_token_ids=[9], include_stop_str_in_output=True
        ),
        response=pb.ResponseOptions(
            num_prompt_logprobs=2, return_routed_experts=True, skip_special_tokens=False
        ),
        priority=-3,
        cache_salt="mine",
    )
    (request,) = served.engine.requests
    params = request.params
    assert (params.min_p, params.repetition_penalty) == (0.25, 1.5)
    assert (params.presence_penalty, params.frequency_penalty) == (-2, 2)
    assert (params.logit_bias, params.allowed_token_ids) == (((3, 1.5), (7, -100.0)), (7, 9))
    tokenizer = served.engine.tokenizer
    assert tokenizer is not None
    assert params.bad_words == (tuple(tokenizer.encode("ab")),)
    assert (params.max_tokens, params.min_tokens, params.stop_token_ids) == (5, 2, (9,))
    assert (params.include_stop_str_in_output, params.skip_special_tokens) == (True, False)
    assert (params.num_prompt_logprobs, params.return_routed_experts) == (2, True)
    assert (request.priority, request.cache_salt) == (-3, "mine")


async def test_false_is_not_absent(served: Served) -> None:
    """Options whose default is true can be turned off, and are on when absent."""
    for fields, skip in (({}, True), ({"skip_special_tokens": False}, False)):
        await served.generate(prompt="a", response=pb.ResponseOptions(**fields))
        assert served.engine.requests[-1].params.skip_special_tokens is skip


async def test_prompt_tokens_and_experts(served: Served) -> None:
    """The prompt with its log probabilities once, experts with the last message."""
    served.engine.num_cached = 2
    responses = await served.generate(
        prompt="xyz",
        stopping=pb.StoppingOptions(max_tokens=2),
        response=pb.ResponseOptions(
            num_prompt_logprobs=1, return_routed_experts=True, routed_experts_prompt_start=1
        ),
    )
    first, *others = responses
    assert [token.token for token in first.prompt_tokens] == ["x", "y", "z"]
    assert [token.HasField("logprob") for token in first.prompt_tokens] == [False, True, True]
    assert first.prompt_tokens[1].top_logprobs[0].token == "y"
    assert not any(response.prompt_tokens for response in others)
    assert not any(response.HasField("routed_experts") for response in responses[:-1])
    found = responses[-1].routed_experts
    experts = np.frombuffer(found.experts, "<u2").reshape(found.shape)
    assert experts.shape == (3, 1, 2)
    assert experts[:, 0, 0].tolist() == [1, 2, 3]
    assert responses[-1].usage.cached_tokens == 2


async def test_what_stopped_it(served: Served) -> None:
    """A stop string and a stop token have fields of their own."""
    tokenizer = served.engine.tokenizer
    assert tokenizer is not None
    (space,) = tokenizer.encode(" ")
    for stopping, reason, token_id in (
        (pb.StoppingOptions(stop=["the"]), "the", None),
        (pb.StoppingOptions(stop_token_ids=[space]), "", space),
        (pb.StoppingOptions(), "", None),
    ):
        *_, last = await served.generate(prompt="a", stopping=stopping)
        assert last.stop_reason == reason
        assert (last.stop_token_id if last.HasField("stop_token_id") else None) == token_id


async def test_truncation_and_special_tokens(served: Served) -> None:
    """The end of a longer prompt is kept, of every kind of prompt."""
    tokenizer = served.engine.tokenizer
    assert tokenizer is not None
    message = pb.ChatMessage(role="user", content="a" * 2000)
    for fields in (
        {"prompt": "a" * 2000},
        {"prompt_token_ids": pb.TokenIds(ids=[5] * 2000)},
        {"conversation": pb.Conversation(messages=[message])},
    ):
        await served.generate(truncate_prompt_tokens=7, **fields)
        assert len(served.engine.requests[-1].prompt_token_ids) == 7
        stopping = pb.StoppingOptions(max_tokens=12)
        await served.generate(truncate_prompt_tokens=-1, stopping=stopping, **fields)
        assert len(served.engine.requests[-1].prompt_token_ids) == CONTEXT - 12


@pytest.mark.parametrize(
    ("structured", "text"),
    [
        (pb.StructuredOutput(json_schema='{"type": "object"}'), "json"),
        (pb.StructuredOutput(json_object=True), "json"),
        (pb.StructuredOutput(regex="[ab]+"), "[ab]"),
        (pb.StructuredOutput(choice=pb.TextChoices(values=["yes", "no"])), "yes"),
        (pb.StructuredOutput(grammar='start: "a" | "b"'), "start"),
    ],
    ids=lambda value: value.WhichOneof("constraint") if not isinstance(value, str) else "",
)
async def test_structured_output(
    served: Served, structured: pb.StructuredOutput, text: str
) -> None:
    """Each kind becomes a grammar for the engine."""
    await served.generate(prompt="a", structured_output=structured)
    assert text in served.engine.requests[0].params.grammar


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"sampling": pb.SamplingOptions(min_p=2)}, "sampling.min_p"),
        ({"sampling": pb.SamplingOptions(repetition_penalty=0)}, "sampling.repetition_penalty"),
        ({"sampling": pb.SamplingOptions(presence_penalty=3)}, "sampling.presence_penalty"),
        (
            {"sampling": pb.SamplingOptions(frequency_penalty=float("nan"))},
            "sampling.frequency_penalty",
        ),
        ({"sampling": pb.SamplingOptions(logit_bias={VOCAB_SIZE: 1})}, "sampling.logit_bias"),
        ({"sampling": pb.SamplingOptions(logit_bias={1: 101})}, "sampling.logit_bias"),
        ({"sampling": pb.SamplingOptions(logit_bias={1: float("nan")})}, "sampling.logit_bias"),
        (
            {"sampling": pb.SamplingOptions(allowed_token_ids=[VOCAB_SIZE])},
            "sampling.allowed_token_ids",
        ),
        ({"sampling": pb.SamplingOptions(bad_words=[" "])}, "sampling.bad_words"),
        ({"stopping": pb.StoppingOptions(min_tokens=5, max_tokens=4)}, "stopping.min_tokens"),
        ({"stopping": pb.StoppingOptions(stop_token_ids=[VOCAB_SIZE])}, "stopping.stop_token_ids"),
        ({"response": pb.ResponseOptions(num_prompt_logprobs=21)}, "response.num_prompt_logprobs"),
        (
            {
                "response": pb.ResponseOptions(
                    return_routed_experts=True, routed_experts_prompt_start=2
                )
            },
            "response.routed_experts_prompt_start",
        ),
        ({"cache_salt": "a/b"}, "cache_salt"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": CONTEXT + 1}, "truncate_prompt_tokens"),
        (
            {"structured_output": pb.StructuredOutput(json_schema="{")},
            "structured_output.json_schema",
        ),
        (
            {"structured_output": pb.StructuredOutput(json_object=False)},
            "structured_output.json_object",
        ),
        ({"structured_output": pb.StructuredOutput(regex="(")}, "structured_output.regex"),
        (
            {"structured_output": pb.StructuredOutput(choice=pb.TextChoices())},
            "structured_output.choice",
        ),
        ({"structured_output": pb.StructuredOutput(grammar="")}, "structured_output.grammar"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_refused(served: Served, fields: dict[str, object], field: str) -> None:
    """INVALID_ARGUMENT names the field by its path in the message; nothing starts."""
    code, details = await served.refused(prompt="a", **fields)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    fields_named = [v.field for d in details for v in getattr(d, "field_violations", ())]
    assert fields_named == [field]
    assert served.engine.requests == []


async def test_deadlines(served: Served) -> None:
    """A call's own deadline is the request's; a request that is too late has its status."""
    await served.generate(prompt="a")
    (request,) = served.engine.requests
    assert request.deadline_s is not None
    assert 0 < request.deadline_s - request.arrival_s <= 10.1  # gRPC sends 10.001 s as 10.1 s
    served.engine.manual = True
    call = served.stub.Generate(pb.GenerateRequest(prompt="a"), timeout=5)
    pending = aiter(call)
    waiting = anext(pending)
    await served.engine.wait_for(lambda: len(served.engine.requests) == 2)
    late = DeadlineError("the request was not done within 3 s")
    served.engine.emit(finish_reason=FinishReason.ERROR, error=late)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await waiting
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert caught.value.details() == str(late)
