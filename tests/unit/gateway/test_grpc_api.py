"""The gRPC API over a scripted engine, with a real client and server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from expertmesh.errors import (
    EngineError,
    ExpertUnavailableError,
    OverloadedError,
    PortError,
    QuarantineError,
    StoppingError,
)
from expertmesh.v1 import generation_service_pb2 as pb
from gateway.grpc_api import SERVICE, GrpcServer
from gateway.mesh.mesh_status import ExpertWorkerState, ExpertWorkerStatus, MeshStatus
from gateway.sequence import EngineStats, FinishReason
from tests.support.grpc_calls import TIMEOUT_S, Served, details_of, serving
from tests.support.scripted_engine import CONTEXT, VOCAB_SIZE

UNCOVERED = MeshStatus(
    epoch=4,
    workers=(ExpertWorkerStatus("w1", "h:1", ExpertWorkerState.UNREACHABLE, "no answer", 3),),
    uncovered={1: (6, 7)},
    ready=False,
)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """A server whose model has a tokenizer."""
    async with serving() as running:
        yield running


async def test_text_is_streamed_in_deltas(served: Served) -> None:
    """Deltas add up; the last one has the finish reason and the usage, the others neither."""
    responses = await served.generate(prompt="hello")
    assert "".join(response.text for response in responses) == "Hi there"
    assert [response.finish_reason for response in responses[:-1]] == [0] * (len(responses) - 1)
    assert responses[-1].finish_reason == pb.FINISH_REASON_STOP
    assert (responses[-1].usage.prompt_tokens, responses[-1].usage.completion_tokens) == (5, 8)
    assert not responses[0].HasField("usage")
    assert len({response.request_id for response in responses}) == 1
    assert [token for response in responses for token in response.tokens] == []


async def test_what_is_degraded_says_so(served: Served) -> None:
    """In the last message, and only if something was."""
    assert not (await served.generate(prompt="hello"))[-1].degraded
    served.engine.manual = True
    call = served.stub.Generate(pb.GenerateRequest(prompt="a"), timeout=TIMEOUT_S)
    await served.engine.wait_for(lambda: len(served.engine.requests) == 2)
    served.engine.emit("Hi", is_degraded=True)
    assert not (await call.read()).degraded
    served.engine.emit(finish_reason=FinishReason.STOP, is_degraded=True)
    assert (await call.read()).degraded


async def test_defaults_are_those_of_http(served: Served) -> None:
    """Absent options: temperature 1, all tokens, random seed, the rest of the context."""
    await served.generate(prompt="hello")
    params = served.engine.requests[0].params
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)
    assert (params.max_tokens, params.stop, params.num_logprobs) == (CONTEXT - 5, (), None)


async def test_options_reach_the_engine(served: Served) -> None:
    """Present options are passed on, zeros included."""
    await served.generate(
        prompt_token_ids=pb.TokenIds(ids=[1, 2]),
        request_id="mine",
        sampling=pb.SamplingOptions(temperature=0, top_p=0.5, top_k=3, seed=-2),
        stopping=pb.StoppingOptions(max_tokens=4, stop=["a", "b"], ignore_eos=True),
        response=pb.ResponseOptions(num_logprobs=0),
    )
    (request,) = served.engine.requests
    params = request.params
    assert (request.request_id, request.prompt_token_ids) == ("mine", (1, 2))
    assert (params.temperature, params.top_p, params.top_k) == (0.0, 0.5, 3)
    assert (params.seed, params.max_tokens, params.stop) == (2**64 - 2, 4, ("a", "b"))
    assert (params.ignore_eos, params.num_logprobs) == (True, 0)


async def test_tokens_and_logprobs_on_demand(served: Served) -> None:
    """Token ids alone, or with text and log probabilities."""
    ids = await served.generate(prompt="a", response=pb.ResponseOptions(return_token_ids=True))
    tokens = [token for response in ids for token in response.tokens]
    assert [token.token for token in tokens] == [""] * 8
    assert not tokens[0].HasField("logprob")
    full = await served.generate(prompt="a", response=pb.ResponseOptions(num_logprobs=2))
    tokens = [token for response in full for token in response.tokens]
    assert "".join(token.token for token in tokens) == "Hi there"
    assert [candidate.logprob for candidate in tokens[0].top_logprobs] == [-0.25, -0.5]


async def test_conversations_use_the_chat_template(served: Served) -> None:
    """A conversation is encoded as over HTTP."""
    message = pb.ChatMessage(role="user", content="hi")
    await served.generate(conversation=pb.Conversation(messages=[message]))
    tokenizer = served.frontend.model.tokenizer
    assert tokenizer is not None
    ids = served.engine.requests[0].prompt_token_ids
    assert list(ids) == tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


NAN, INF = float("nan"), float("inf")
BAD_FIELDS = {
    "input": {},
    "prompt": {"prompt": ""},
    "prompt_token_ids": {"prompt_token_ids": pb.TokenIds(ids=[VOCAB_SIZE])},
    "sampling.temperature": {"sampling": pb.SamplingOptions(temperature=NAN)},
    "sampling.top_p": {"sampling": pb.SamplingOptions(top_p=0)},
    "sampling.top_k": {"sampling": pb.SamplingOptions(top_k=VOCAB_SIZE + 1)},
    "stopping.max_tokens": {"stopping": pb.StoppingOptions(max_tokens=CONTEXT)},
    "stopping.stop": {"stopping": pb.StoppingOptions(stop=["a", ""])},
    "response.num_logprobs": {"response": pb.ResponseOptions(num_logprobs=21)},
    "conversation.messages": {"conversation": pb.Conversation()},
    "conversation.messages.0.role": {
        "conversation": pb.Conversation(messages=[pb.ChatMessage(role="king", content="a")])
    },
    "request_id": {"request_id": "a b"},
}


@pytest.mark.parametrize("field", BAD_FIELDS)
async def test_bad_fields_are_named(served: Served, field: str) -> None:
    """INVALID_ARGUMENT, with the path of the field in a BadRequest; nothing is computed."""
    fields: dict[str, object] = dict(BAD_FIELDS[field])
    if field != "input" and not {"prompt", "prompt_token_ids", "conversation"} & set(fields):
        fields["prompt"] = "hello"
    code, details = await served.refused(**fields)
    (bad, info) = details
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(bad, error_details_pb2.BadRequest)
    assert [violation.field for violation in bad.field_violations] == [field]
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert info.domain == "expertmesh"
    assert served.engine.requests == []


@pytest.mark.parametrize("value", [INF, -INF, NAN, -1.0, 2.5])
async def test_odd_floats(served: Served, value: float) -> None:
    """Numbers that are not finite or out of range never reach the engine."""
    code, _ = await served.refused(prompt="a", sampling=pb.SamplingOptions(temperature=value))
    assert code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("error", "code", "reason", "retry"),
    [
        (StoppingError(), grpc.StatusCode.UNAVAILABLE, "ENGINE_OVERLOADED", True),
        (OverloadedError("full"), grpc.StatusCode.UNAVAILABLE, "ENGINE_OVERLOADED", True),
        (
            ExpertUnavailableError([(3, 1)], detail="secret address"),
            grpc.StatusCode.UNAVAILABLE,
            "EXPERT_UNAVAILABLE",
            True,
        ),
        (EngineError("secret"), grpc.StatusCode.INTERNAL, "ENGINE_ERROR", False),
        (QuarantineError(3), grpc.StatusCode.INTERNAL, "REQUEST_QUARANTINED", False),
        (RuntimeError("secret"), grpc.StatusCode.INTERNAL, "INTERNAL_ERROR", False),
    ],
)
async def test_failures_have_details(
    served: Served, error: Exception, code: grpc.StatusCode, reason: str, retry: bool
) -> None:
    """Code, reason and the time after which to try again; no text of an internal error."""
    served.engine.refuse = error
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.generate(prompt="a")
    details = details_of(caught.value)
    infos = [detail for detail in details if isinstance(detail, error_details_pb2.ErrorInfo)]
    retries = [detail for detail in details if isinstance(detail, error_details_pb2.RetryInfo)]
    assert (caught.value.code(), infos[0].reason, bool(retries)) == (code, reason, retry)
    assert "secret" not in str(caught.value.details())


async def test_an_error_in_the_middle(served: Served) -> None:
    """What was generated arrives, then the status."""
    served.engine.manual = True
    call = served.stub.Generate(pb.GenerateRequest(prompt="a"), timeout=TIMEOUT_S)
    await served.engine.wait_for(lambda: len(served.engine.requests) == 1)
    served.engine.emit("Hi")
    assert (await call.read()).text == "Hi"
    served.engine.emit(finish_reason=FinishReason.ERROR, error=ExpertUnavailableError([(3, 1)]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    info = details_of(caught.value)[0]
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert dict(info.metadata) == {"layer_expert": "3:1"}


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_call_that_ends_early_cancels_its_request(served: Served, how: str) -> None:
    """Cancel and deadline free the request in the engine."""
    served.engine.manual = True
    timeout = TIMEOUT_S if how == "cancel" else 0.3
    call = served.stub.Generate(pb.GenerateRequest(prompt="a"), timeout=timeout)
    await served.engine.wait_for(lambda: len(served.engine.requests) == 1)
    served.engine.emit("Hi")
    assert (await call.read()).text == "Hi"
    if how == "cancel":
        call.cancel()
    request_id = served.engine.requests[0].request_id
    await served.engine.wait_for(lambda: served.engine.cancelled == [request_id])
    expected = {"cancel": grpc.StatusCode.CANCELLED, "deadline": grpc.StatusCode.DEADLINE_EXCEEDED}
    assert await call.code() is expected[how]


async def test_abort_ends_a_call(served: Served) -> None:
    """Abort by id: the call ends well with FINISH_REASON_ABORT; unknown ids are not found."""
    served.engine.manual = True
    call = served.stub.Generate(
        pb.GenerateRequest(prompt="a", request_id="mine"), timeout=TIMEOUT_S
    )
    await served.engine.wait_for(lambda: len(served.engine.requests) == 1)
    code, details = await served.refused(prompt="b", request_id="mine")
    assert code is grpc.StatusCode.ALREADY_EXISTS, details
    assert (await served.stub.Abort(pb.AbortRequest(request_id="mine"))).found
    assert not (await served.stub.Abort(pb.AbortRequest(request_id="other"))).found
    responses = [response async for response in call]
    assert responses[-1].finish_reason == pb.FINISH_REASON_ABORT
    assert served.engine.cancelled == ["mine"]


async def test_bytes_that_are_no_message(served: Served) -> None:
    """INVALID_ARGUMENT instead of UNKNOWN, for every kind of call; the server goes on."""
    for method, garbage in (("Generate", b"\x0a\xff"), ("Generate", b"\x1a\x02\xc3\x28")):
        call = served.channel.unary_stream(f"/{SERVICE}/{method}")(garbage, timeout=TIMEOUT_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.channel.unary_unary(f"/{SERVICE}/Tokenize")(b"\xff", timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await served.generate(prompt="still here")


async def test_a_message_over_the_limit_is_refused(served: Served) -> None:
    """RESOURCE_EXHAUSTED, before the message is decoded."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Tokenize(pb.TokenizeRequest(text="x" * (11 * 2**20)), timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_tokenize_and_detokenize(served: Served) -> None:
    """Text survives the way to token ids and back; bad ids are named."""
    text = "naïve 日本語 🙂"
    answer = await served.stub.Tokenize(pb.TokenizeRequest(text=text), timeout=TIMEOUT_S)
    assert answer.max_model_len == CONTEXT
    back = await served.stub.Detokenize(
        pb.DetokenizeRequest(token_ids=answer.token_ids), timeout=TIMEOUT_S
    )
    assert text == back.text
    assert (await served.stub.Detokenize(pb.DetokenizeRequest(), timeout=TIMEOUT_S)).text == ""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Detokenize(pb.DetokenizeRequest(token_ids=[9999]), timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_model_and_server(served: Served) -> None:
    """The model is described as it is, the server with its load."""
    model = await served.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=TIMEOUT_S)
    assert (model.model, model.num_layers, model.num_moe_layers) == ("tiny", 2, 1)
    assert (model.num_experts, model.top_k, model.has_tokenizer) == (8, 2, True)
    served.engine.load = EngineStats(num_running=2, num_waiting=1)
    info = await served.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT_S)
    assert (info.ready, info.num_requests_running, info.num_requests_waiting) == (True, 2, 1)
    code, _ = await served.refused(prompt="a", model="other")
    assert code is grpc.StatusCode.NOT_FOUND


async def test_watch_sends_changes(served: Served) -> None:
    """A snapshot at once, another one when something changes, and an end with the gateway."""
    call = served.stub.WatchExperts(pb.WatchExpertsRequest(), timeout=TIMEOUT_S)
    first = await call.read()
    assert (first.epoch, list(first.workers)) == (1, [])
    served.mesh = UNCOVERED
    second = await call.read()
    assert (second.epoch, second.workers[0].state, second.workers[0].message) == (
        4,
        "unreachable",
        "no answer",
    )
    assert [(u.layer, list(u.experts)) for u in second.uncovered] == [(1, [6, 7])]
    served.frontend.stop_accepting()
    assert await call.read() is grpc.aio.EOF


async def test_health_follows_readiness(served: Served) -> None:
    """SERVING for the server and the service while requests can be served."""
    health = health_pb2_grpc.HealthStub(served.channel)
    for service in ("", SERVICE):
        served.mesh = MeshStatus(epoch=1)
        call = health.Watch(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
        states = health_pb2.HealthCheckResponse
        seen = [(await call.read()).status]
        while seen[-1] != states.SERVING:
            seen.append((await call.read()).status)
        served.mesh = replace(UNCOVERED)
        assert (await call.read()).status == states.NOT_SERVING
        call.cancel()


async def test_reflection_lists_the_services(served: Served) -> None:
    """Clients without the proto find the service."""
    stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    call = stub.ServerReflectionInfo(timeout=TIMEOUT_S)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    await call.done_writing()
    names = {service.name for service in answer.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.channel.unary_unary(f"/{SERVICE}/Nothing")(b"", timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_without_a_tokenizer() -> None:
    """Token ids go in and come out; everything about text is refused."""
    async with serving(tokenizer=False) as served:
        responses = await served.generate(
            prompt_token_ids=pb.TokenIds(ids=[1]),
            response=pb.ResponseOptions(return_token_ids=True),
        )
        assert [t.token_id for response in responses for t in response.tokens] == [5, 6, 7]
        code, _ = await served.refused(prompt="a")
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.Tokenize(pb.TokenizeRequest(text="a"), timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_port_in_use_is_a_startup_error(served: Served) -> None:
    """The error names the address and what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = GrpcServer(served.frontend, "127.0.0.1", port)
        with pytest.raises(PortError, match=str(port)):
            await server.start()
    await asyncio.sleep(0)
