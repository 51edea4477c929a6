"""ExpertService on a socket: whatever a peer sends, it gets its answer and the rest goes on."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2

from expert_worker.backend import raw_array
from expert_worker.metrics import serve_metrics
from expert_worker.scrubber import NoScrubber
from expert_worker.server import ExpertServer
from expertmesh.call_waits import WAIT_BOUNDS_S
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import PortError
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import encode_tensor
from tests.conftest import Models
from tests.support.expert_metrics import EXPERT_METRICS
from tests.support.expert_servers import ROW_CREDITS, expert_server, loaded_store
from tests.support.expert_wire import (
    HIDDEN,
    TIMEOUT_S,
    RawStream,
    busy_device,
    channel,
    health,
    request,
)
from tests.support.processes import poll
from tests.support.tiny_checkpoints import MIXTRAL

E = pb.ForwardError


@pytest.fixture(scope="module")
def checkpoint(models: Models) -> Checkpoint:
    """A tiny Mixtral: 3 layers, 8 experts, top-2."""
    return Checkpoint.open(models.tiny(MIXTRAL))


@pytest.fixture
def server(checkpoint: Checkpoint) -> Iterator[ExpertServer]:
    """An expert worker with experts 0 to 3 of each layer."""
    with expert_server(loaded_store(checkpoint, "float32", "0-3"), max_streams=2) as started:
        yield started


def test_reply_has_the_outputs_of_the_experts(server: ExpertServer) -> None:
    """One row per pair, in the order of the pairs, with the id echoed."""
    message = request(server)
    with channel(server) as opened:
        (reply,) = RawStream(opened, [message.SerializeToString()]).read()
    assert message.id == reply.id
    assert server.state.identity.incarnation == reply.incarnation
    assert reply.row_credits == ROW_CREDITS
    assert list(reply.outputs.shape) == [3, HIDDEN]
    x_RH = torch.ones(2, HIDDEN)
    pairs = np.array([0, 0, 1]), np.array([0, 3, 1])
    expected = raw_array(server.backend.run(1, x_RH, *pairs).outputs_NH)
    assert expected.tobytes() == reply.outputs.data


def test_wrong_messages_are_answered_and_the_stream_goes_on(server: ExpertServer) -> None:
    """Garbage, a truncated message, missing experts, NaN and others: named errors, one stream."""
    good = request(server).SerializeToString()
    nan = request(server)
    nan.hidden_states.CopyFrom(encode_tensor(np.full((2, HIDDEN), np.nan, np.float32), "float32"))
    absent = request(server, expert_ids=np.array([0, 5, 7], np.uint32).tobytes())
    credits = request(server)
    credits.hidden_states.shape[0] = ROW_CREDITS + 1
    cases: list[tuple[bytes, int, str]] = [
        (b"\xff\xff\xff", E.CODE_INVALID_ARGUMENT, "12 bytes are not a ForwardRequest"),
        (good[:-3], E.CODE_INVALID_ARGUMENT, "are not a ForwardRequest"),
        (b"", E.CODE_INVALID_ARGUMENT, "id is missing"),
        (absent.SerializeToString(), E.CODE_EXPERT_NOT_RESIDENT, "layer 1 expert 5"),
        (nan.SerializeToString(), E.CODE_NONFINITE_INPUT, "row 0"),
        (credits.SerializeToString(), E.CODE_RESOURCE_EXHAUSTED, "row credits"),
        (
            request(server, incarnation=1).SerializeToString(),
            E.CODE_STALE_INCARNATION,
            "incarnation is 0x1",
        ),
        (
            request(server, model_fingerprint=2).SerializeToString(),
            E.CODE_WRONG_MODEL,
            "model_fingerprint is 0x2",
        ),
    ]
    messages = [part for case in cases for part in (case[0], good)]
    with channel(server) as opened:
        replies = RawStream(opened, messages).read()
    assert len(replies) == len(messages)
    for (_, code, text), reply, next_reply in zip(cases, replies[::2], replies[1::2], strict=True):
        assert code == reply.error.code
        assert text in reply.error.message
        assert next_reply.HasField("outputs")
    assert list(replies[6].error.expert_ids) == [5, 7]
    assert replies[6].id == absent.id
    assert server.state.load().errors == len(cases)


def test_time_that_is_used_up_is_not_spent(server: ExpertServer) -> None:
    """A call that waits for the device longer than its time left is dropped, not computed."""
    message = request(server, time_left_us=20_000).SerializeToString()
    with channel(server) as opened, busy_device(server):
        (reply,) = RawStream(opened, [message]).read()
    assert reply.error.code == E.CODE_DEADLINE_EXCEEDED
    assert "time_left_us is 20000" in reply.error.message


def test_streams_share_the_device(server: ExpertServer) -> None:
    """Two streams wait while a call computes, and report the time in their queue."""
    message = request(server).SerializeToString()
    with channel(server) as opened:
        with busy_device(server):
            streams = [RawStream(opened, [message]) for _ in range(2)]
            poll(lambda: server.state.calls_in_flight == 2, timeout_s=TIMEOUT_S, what="both wait")
            assert server.state.load().queued_calls == 1
            assert server.state.load().streams == 2
        replies = [reply for stream in streams for reply in stream.read()]
    assert all(reply.HasField("outputs") and reply.queue_us > 0 for reply in replies)
    assert replies[0].outputs.data == replies[1].outputs.data
    load = server.state.load()
    assert len(load.calls_by_wait) == len(WAIT_BOUNDS_S) + 1
    assert sum(load.calls_by_wait) == load.calls == 2
    assert 0 < load.compute_us + load.queue_us / 2 < load.uptime_us


def test_message_above_the_limit(server: ExpertServer) -> None:
    """A message larger than any valid one ends its stream with RESOURCE_EXHAUSTED, no more."""
    with channel(server) as opened:
        huge = RawStream(opened, [bytes(64 * 2**20)])
        with pytest.raises(grpc.RpcError) as caught:
            huge.read()
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        (reply,) = RawStream(opened, [request(server).SerializeToString()]).read()
        assert reply.HasField("outputs")


def test_too_many_streams(server: ExpertServer) -> None:
    """A stream more than allowed is refused at once; health checks still get through."""
    gate = threading.Event()

    def waiting() -> Iterator[bytes]:
        gate.wait(TIMEOUT_S)
        yield from ()

    with channel(server) as opened:
        open_streams = [RawStream(opened, waiting()) for _ in range(2)]
        poll(lambda: server.state.num_streams == 2, timeout_s=TIMEOUT_S, what="two streams")
        with pytest.raises(grpc.RpcError) as caught:
            RawStream(opened, []).read()
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2 streams are open already" in str(caught.value.details())
        assert health(opened) == health_pb2.HealthCheckResponse.SERVING
        gate.set()
        assert [stream.read() for stream in open_streams] == [[], []]
    poll(lambda: server.state.num_streams == 0, timeout_s=TIMEOUT_S, what="no streams")


def test_internal_failure_is_answered(
    server: ExpertServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug or a device failure becomes CODE_INTERNAL; the stream goes on."""
    good = request(server).SerializeToString()
    run = server.backend.run
    calls: list[int] = []

    def fail_first(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("device lost")
        return run(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(server.backend, "run", fail_first)
    with channel(server) as opened:
        first, second = RawStream(opened, [good, good]).read()
    assert (first.error.code, first.error.message) == (
        E.CODE_INTERNAL,
        "RuntimeError: device lost",
    )
    assert second.HasField("outputs")


def test_port_in_use(server: ExpertServer) -> None:
    """A second server on the port fails with one clear line; the first goes on."""
    with pytest.raises(PortError, match=f"cannot listen on 127.0.0.1:{server.port}: Address"):
        ExpertServer(server.state.store, server.state.identity, "127.0.0.1", server.port, 2)
    with channel(server) as opened:
        assert health(opened) == health_pb2.HealthCheckResponse.SERVING


def test_metrics(server: ExpertServer) -> None:
    """/metrics has what happened, under the documented names."""
    with channel(server) as opened:
        RawStream(opened, [request(server).SerializeToString(), b"\xff"]).read()
    http, thread = serve_metrics(server.state, server.scrubber.counts, "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{http.server_port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        with pytest.raises(PortError, match="for metrics"):
            serve_metrics(server.state, NoScrubber().counts, "127.0.0.1", http.server_port)
    finally:
        http.shutdown()
        http.server_close()
        thread.join(TIMEOUT_S)
    for line in (
        "moe_worker_resident_experts 12.0",
        "moe_worker_queue_depth 0.0",
        "moe_worker_calls_total 1.0",
        "moe_worker_errors_total 1.0",
        'moe_worker_batch_tokens_bucket{le="2.0"} 1.0',
        "moe_worker_batch_tokens_sum 2.0",
        'moe_expert_queue_wait_seconds_bucket{le="+Inf"} 1.0',
        'moe_worker_expert_tokens_total{expert="3",layer="1"} 1.0',
        'moe_worker_expert_tokens_total{expert="2",layer="1"} 0.0',
    ):
        assert line in lines
    types = {line.split()[2].removesuffix("_total") for line in lines if line.startswith("# TYPE")}
    assert types == EXPERT_METRICS
