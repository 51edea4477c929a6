"""The public gRPC API with a real client: generation, health, reflection, errors, buf curl."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from expertmesh.v1 import generation_service_pb2 as pb
from expertmesh.v1 import generation_service_pb2_grpc as rpc
from tests.support.mesh import Server
from tests.support.processes import poll

SERVICE = "expertmesh.v1.GenerationService"
TIMEOUT_S = 20


@pytest.fixture(scope="module")
def channel(text_server: Server) -> Iterator[grpc.Channel]:
    """A channel to the server."""
    with grpc.insecure_channel(f"127.0.0.1:{text_server.grpc_port}") as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> rpc.GenerationServiceStub:
    """A client of the server."""
    return rpc.GenerationServiceStub(channel)


def _greedy(prompt: str, max_tokens: int, **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt=prompt,
        sampling=pb.SamplingOptions(temperature=0),
        stopping=pb.StoppingOptions(max_tokens=max_tokens, ignore_eos=True),
        response=pb.ResponseOptions(return_token_ids=True, num_logprobs=2),
        **fields,
    )


def _call(error: pytest.ExceptionInfo[grpc.RpcError]) -> grpc.Call:
    assert isinstance(error.value, grpc.Call)
    return error.value


def test_generate_streams_what_http_answers(
    text_server: Server, stub: rpc.GenerationServiceStub
) -> None:
    """Text, token ids and log probabilities equal those of HTTP; only the end has a reason."""
    over_http = text_server.api.complete("The quick brown", 24)
    answers = list(stub.Generate(_greedy("The quick brown", 24), timeout=TIMEOUT_S))
    tokens = [token for answer in answers for token in answer.tokens]
    assert over_http.text == "".join(answer.text for answer in answers)
    assert list(over_http.token_ids) == [token.token_id for token in tokens]
    assert list(over_http.logprobs) == pytest.approx([token.logprob for token in tokens], abs=1e-6)
    assert all(len(token.top_logprobs) == 2 for token in tokens)
    assert len(answers) > 2
    reasons = [answer.finish_reason for answer in answers]
    assert reasons[:-1] == [pb.FINISH_REASON_UNSPECIFIED] * (len(answers) - 1)
    assert reasons[-1] == pb.FINISH_REASON_LENGTH
    assert answers[-1].usage.completion_tokens == 24
    assert len({answer.request_id for answer in answers}) == 1


def test_token_ids_and_conversations(text_server: Server, stub: rpc.GenerationServiceStub) -> None:
    """Prompts may be token ids or conversations too."""
    prompt = list(stub.Tokenize(pb.TokenizeRequest(text="The quick brown")).token_ids)
    by_ids = pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.SamplingOptions(temperature=0),
        stopping=pb.StoppingOptions(max_tokens=8, ignore_eos=True),
    )
    text = "".join(answer.text for answer in stub.Generate(by_ids, timeout=TIMEOUT_S))
    assert text_server.api.complete("The quick brown", 8).text == text
    chat = {
        "messages": [{"role": "user", "content": "Hello"}],
        "temperature": 0,
        "max_tokens": 8,
        "ignore_eos": True,
    }
    over_http = text_server.api.post("/v1/chat/completions", chat).json
    conversation = pb.Conversation(messages=[pb.ChatMessage(role="user", content="Hello")])
    request = pb.GenerateRequest(
        conversation=conversation, sampling=by_ids.sampling, stopping=by_ids.stopping
    )
    answered = "".join(answer.text for answer in stub.Generate(request, timeout=TIMEOUT_S))
    assert over_http["choices"][0]["message"]["content"] == answered


def test_tokenize_and_back(stub: rpc.GenerationServiceStub) -> None:
    """Text survives the way to token ids and back."""
    text = "naïve café, 日本語 🙂"
    answer = stub.Tokenize(pb.TokenizeRequest(text=text))
    assert answer.max_model_len == 512
    back = stub.Detokenize(pb.DetokenizeRequest(token_ids=answer.token_ids))
    assert text == back.text


def test_model_and_server_info(text_server: Server, stub: rpc.GenerationServiceStub) -> None:
    """The model is described as it is, and the server is ready."""
    model = stub.GetModelInfo(pb.GetModelInfoRequest())
    served = text_server.api.get("/v1/models").json["data"][0]["id"]
    assert (model.model, model.family, model.dtype) == (served, "mixtral", "float32")
    assert (model.num_layers, model.num_moe_layers, model.num_experts, model.top_k) == (3, 3, 8, 2)
    assert (model.max_model_len, model.vocab_size, model.has_tokenizer) == (512, 320, True)
    assert stub.GetServerInfo(pb.GetServerInfoRequest()).ready


def test_watch_experts_starts_with_a_snapshot(stub: rpc.GenerationServiceStub) -> None:
    """The first message lists the expert workers, which cover everything."""
    stream = stub.WatchExperts(pb.WatchExpertsRequest(), timeout=TIMEOUT_S)
    snapshot = next(stream)
    stream.cancel()
    assert [worker.state for worker in snapshot.workers] == ["ready", "ready"]
    assert sum(worker.num_experts for worker in snapshot.workers) >= 24  # copies come by and by
    assert not snapshot.uncovered
    assert list(snapshot.uncovered) == []


def test_health(channel: grpc.Channel) -> None:
    """grpc.health.v1 says SERVING for the server and for the service."""
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", SERVICE):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection(channel: grpc.Channel) -> None:
    """Reflection lists the public service and health."""
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
        iter([request]), timeout=TIMEOUT_S
    )
    names = {service.name for service in answer.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize(
    ("request_", "code", "field"),
    [
        (pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "input"),
        (pb.GenerateRequest(prompt=""), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        (
            pb.GenerateRequest(prompt="a", sampling=pb.SamplingOptions(temperature=-1)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "sampling.temperature",
        ),
        (
            pb.GenerateRequest(prompt="a", sampling=pb.SamplingOptions(top_p=float("nan"))),
            grpc.StatusCode.INVALID_ARGUMENT,
            "sampling.top_p",
        ),
        (
            pb.GenerateRequest(prompt="a", stopping=pb.StoppingOptions(max_tokens=0)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "stopping.max_tokens",
        ),
        (
            pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[5, 320])),
            grpc.StatusCode.INVALID_ARGUMENT,
            "prompt_token_ids",
        ),
    ],
    ids=["no input", "empty", "temperature", "top_p", "max_tokens", "token id"],
)
def test_bad_requests_name_the_field(
    stub: rpc.GenerationServiceStub,
    request_: pb.GenerateRequest,
    code: grpc.StatusCode,
    field: str,
) -> None:
    """A bad field gives INVALID_ARGUMENT with a BadRequest detail that names it."""
    with pytest.raises(grpc.RpcError) as raised:
        list(stub.Generate(request_, timeout=TIMEOUT_S))
    call = _call(raised)
    assert code == call.code(), call.details()
    status = rpc_status.from_call(call)
    details = [
        detail for detail in status.details if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR)
    ]
    bad = error_details_pb2.BadRequest()
    assert details
    assert details[0].Unpack(bad)
    assert [field] == [violation.field for violation in bad.field_violations]


def test_unknown_model_and_method(channel: grpc.Channel, stub: rpc.GenerationServiceStub) -> None:
    """An unknown model is NOT_FOUND, an unknown method UNIMPLEMENTED."""
    with pytest.raises(grpc.RpcError) as raised:
        list(stub.Generate(pb.GenerateRequest(prompt="a", model="other"), timeout=TIMEOUT_S))
    assert _call(raised).code() == grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary(f"/{SERVICE}/Nothing")(b"", timeout=TIMEOUT_S)
    assert _call(raised).code() == grpc.StatusCode.UNIMPLEMENTED


def test_garbage_bytes(channel: grpc.Channel, stub: rpc.GenerationServiceStub) -> None:
    """Bytes that are no message get INVALID_ARGUMENT, and the server goes on serving."""
    for garbage in (b"\xff\xff\xff\xff", b"\x0a\xff", b"\x1a\x02\xc3\x28"):
        with pytest.raises(grpc.RpcError) as raised:
            list(channel.unary_stream(f"/{SERVICE}/Generate")(garbage, timeout=TIMEOUT_S))
        assert _call(raised).code() == grpc.StatusCode.INVALID_ARGUMENT
    assert list(stub.Generate(_greedy("still here", 2), timeout=TIMEOUT_S))


def test_cancel_and_abort_free_everything(
    text_server: Server, stub: rpc.GenerationServiceStub
) -> None:
    """A cancelled or aborted call frees its KV blocks and request slot at once."""
    cancelled = stub.Generate(_greedy("to be cancelled", 400), timeout=TIMEOUT_S)
    next(cancelled)
    cancelled.cancel()
    aborted = stub.Generate(_greedy("to be aborted", 400, request_id="mine"), timeout=TIMEOUT_S)
    next(aborted)
    assert stub.Abort(pb.AbortRequest(request_id="mine")).found
    assert not stub.Abort(pb.AbortRequest(request_id="nobody's")).found
    rest = list(aborted)
    assert rest[-1].finish_reason == pb.FINISH_REASON_ABORT
    poll(
        lambda: (
            text_server.api.metrics()["moe_kv_blocks_used"] == 0
            and text_server.api.metrics()["moe_request_slots_used"] == 0
        ),
        timeout_s=5,
        what="blocks and slots are free",
    )


def test_deadline_ends_the_work(text_server: Server, stub: rpc.GenerationServiceStub) -> None:
    """A call whose deadline passes ends with DEADLINE_EXCEEDED, and its request with it."""
    with pytest.raises(grpc.RpcError) as raised:
        list(stub.Generate(_greedy("too slow", 450), timeout=0.2))
    assert _call(raised).code() == grpc.StatusCode.DEADLINE_EXCEEDED
    poll(
        lambda: text_server.api.metrics()["moe_request_slots_used"] == 0,
        timeout_s=5,
        what="the slot is free",
    )


def test_buf_curl(text_server: Server) -> None:
    """`buf curl` needs no schema: reflection is enough."""
    buf = Path(sys.executable).with_name("buf")
    url = f"http://127.0.0.1:{text_server.grpc_port}/{SERVICE}/Generate"
    data = {"prompt": "The quick brown", "stopping": {"maxTokens": 4}}
    result = subprocess.run(
        [buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "-d", json.dumps(data), url],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "FINISH_REASON_LENGTH" in result.stdout


def test_options_act_as_over_http(text_server: Server, stub: rpc.GenerationServiceStub) -> None:
    """Sampling, stopping, log probabilities of the prompt and experts are those of HTTP."""
    fields = {
        "logit_bias": {"40": 5, "41": 5},
        "allowed_token_ids": list(range(30, 60)),
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.2,
        "min_p": 0.05,
        "temperature": 0.8,
        "seed": 11,
    }
    body = {
        **fields,
        "prompt": "The quick brown",
        "max_tokens": 12,
        "stop_token_ids": [44],
        "prompt_logprobs": 1,
        "return_routed_experts": True,
        "return_token_ids": True,
    }
    (choice,) = text_server.api.post("/v1/completions", body).json["choices"]
    sampling = {**fields, "logit_bias": {40: 5, 41: 5}}
    request = pb.GenerateRequest(
        prompt="The quick brown",
        sampling=pb.SamplingOptions(**sampling),
        stopping=pb.StoppingOptions(max_tokens=12, stop_token_ids=[44]),
        response=pb.ResponseOptions(
            num_prompt_logprobs=1, return_routed_experts=True, return_token_ids=True
        ),
    )
    answers = list(stub.Generate(request, timeout=TIMEOUT_S))
    ids = [token.token_id for answer in answers for token in answer.tokens]
    assert ids == choice["token_ids"]
    assert set(ids) <= {*range(30, 60)}
    found = [token for answer in answers for token in answer.prompt_tokens]
    assert [token.token_id for token in found] == [
        *text_server.api.post("/tokenize", {"prompt": "The quick brown"}).json["tokens"]
    ]
    for token, records in zip(found[1:], choice["prompt_logprobs"][1:], strict=True):
        assert token.logprob == pytest.approx(records[str(token.token_id)]["logprob"], abs=1e-6)
    experts = answers[-1].routed_experts
    grpc_TLK = np.frombuffer(experts.experts, "<u2").reshape(experts.shape)
    http_TLK = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    assert grpc_TLK.shape[0] == len(found) + len(ids) - 1
    assert np.array_equal(grpc_TLK, http_TLK)


def test_structured_output(stub: rpc.GenerationServiceStub) -> None:
    """The output matches what was asked for."""
    request = pb.GenerateRequest(
        prompt="x",
        structured_output=pb.StructuredOutput(regex="[ab]{3}c"),
        stopping=pb.StoppingOptions(max_tokens=32),
    )
    text = "".join(answer.text for answer in stub.Generate(request, timeout=TIMEOUT_S))
    assert re.fullmatch("[ab]{3}c", text)


def test_a_request_that_takes_too_long(text_server: Server) -> None:
    """timeout_s ends it with 504, or within the stream if that has begun."""
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "timeout_s": 0.02}
    answer = text_server.api.post("/v1/completions", body)
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false"
    *_, last = text_server.api.stream("/v1/completions", {**body, "timeout_s": 0.3})
    assert last["error"]["code"] == "deadline_exceeded"
    assert text_server.api.complete("x", 4).finish_reason == "length"
