"""Calls that compiled code answers: the same replies as the other way, whatever goes on."""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest

from expert_worker import compiled_calls
from expert_worker.server import ExpertServer
from expert_worker.store import ExpertStore
from expertmesh.checkpoint import Checkpoint
from expertmesh.model_config import DtypeName
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import decode_tensor
from expertmesh.wire_encode import ReplyHead, encode_reply, join_message
from expertmesh_kernels.cpu.serve import Shared
from expertmesh_kernels.cpu.words import add, take
from tests.support.direct_calls import (
    Caller,
    ask,
    connection_to,
    framed,
    is_compiled,
    read_frame,
    read_reply,
    reply_of_python,
    timeless,
    watch,
)
from tests.support.expert_servers import ROW_CREDITS, expert_server, loaded_store
from tests.support.expert_wire import TIMEOUT_S, busy_device, request
from tests.support.processes import poll

E = pb.ForwardError
ROWS = (1, 2, 7, 40, ROW_CREDITS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_replies_are_those_of_python(
    checkpoint: Checkpoint, dtype: DtypeName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte by byte but for times, with any number of rows; and so are the counters."""
    with expert_server(loaded_store(checkpoint, dtype)) as server:
        assert is_compiled(server)
        caller = Caller(server, 8)
        messages = [caller.message(rows, layer=rows % 3) for rows in ROWS]
        with connection_to(server) as opened:
            unusual = watch(server, monkeypatch)
            replies = []
            for message in messages:
                opened.sendall(framed(message))
                raw = read_frame(opened)
                replies.append(pb.ForwardResponse.FromString(raw))
                assert raw == _encoded(replies[-1], dtype)
            assert unusual == []
        counted = _counted(server)
        assert [timeless(reply) for reply in replies] == [
            reply_of_python(server, message) for message in messages
        ]
        assert [2 * number for number in counted] == _counted(server)


def test_quantised_experts(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed with as they are held."""
    store = ExpertStore(checkpoint, "float32", expert_dtype="int8")
    for expert in range(8):
        store.load(1, expert)
    with expert_server(store) as server:
        message = Caller(server, 8).message(9)
        expected = reply_of_python(server, message)
        unusual = watch(server, monkeypatch)
        with connection_to(server) as opened:
            assert timeless(ask(opened, message)) == expected
            assert timeless(ask(opened, Caller(server, 8).message(2, layer=2))) != expected
        assert len(unusual) == 1, "no expert of layer 2 is here"


def _encoded(reply: pb.ForwardResponse, dtype: DtypeName) -> bytes:
    """The same reply as `wire_encode` writes it."""
    head = ReplyHead(
        reply.id.SerializeToString(), reply.incarnation, reply.queue_us, reply.compute_us,
        reply.row_credits,
    )  # fmt: skip
    outputs_NH, _ = decode_tensor(reply.outputs, "outputs")
    return join_message(encode_reply(head, outputs_NH.copy(), dtype))


def _counted(server: ExpertServer) -> list[int]:
    state = server.state
    load = state.load()
    assert load.errors == 0
    numbers = [load.calls, load.rows, load.pairs, *state.rows_histogram().tolist()]
    return [*numbers, *state.pairs_LE().ravel().tolist()]


def test_ids_are_echoed_as_they_came(server: ExpertServer) -> None:
    """Fields that are 0 are left out, as in serialized messages, whatever was sent."""
    with connection_to(server) as opened:
        for identity in (
            pb.CallId(layer=1),
            pb.CallId(gateway=2**64 - 1, epoch=2**64 - 1, step=2**63, layer=2, attempt=2**32 - 1),
        ):
            message = request(server)
            message.id.CopyFrom(identity)
            reply = ask(opened, message.SerializeToString())
            assert reply.id == identity
            assert reply.HasField("outputs")
            assert reply.row_credits == ROW_CREDITS


def test_order_of_fields_does_not_matter(
    server: ExpertServer, unusual: list[pb.ForwardRequest]
) -> None:
    """Any order is an ordinary message."""
    message = request(server, num_generated_rows=1, time_left_us=10**9)
    parts = []
    for field, _ in message.ListFields():
        one = pb.ForwardRequest()
        one.CopyFrom(message)
        for other, _ in message.ListFields():
            if other.name != field.name:
                one.ClearField(other.name)
        parts.append(one.SerializeToString())
    with connection_to(server) as opened:
        for order in (parts[::-1], parts[3:] + parts[:3]):
            reply = ask(opened, b"".join(order))
            assert timeless(reply) == reply_of_python(server, message.SerializeToString())
    assert len(unusual) == 2, "those of the reference"


def test_frames_in_pieces(server: ExpertServer, unusual: list[pb.ForwardRequest]) -> None:
    """One byte at a time, many at once, and cut anywhere: each is answered once, in order."""
    caller = Caller(server, 4)
    messages = [caller.message(rows, step=step) for step, rows in enumerate((1, 2, 90, 3, 1))]
    stream = b"".join(map(framed, messages))
    expected = [reply_of_python(server, message) for message in messages]
    unusual.clear()
    sizes = np.random.default_rng(1).integers(1, 9000, 100)
    cuts = [0, *np.minimum(np.cumsum(sizes), len(stream)).tolist()]
    with connection_to(server) as opened:
        opened.sendall(stream)
        assert [timeless(read_reply(opened)) for _ in messages] == expected
        for at, end in pairwise(cuts):
            opened.sendall(stream[at:end])
        assert [timeless(read_reply(opened)) for _ in messages] == expected
        for byte in framed(messages[0]):
            opened.sendall(bytes([byte]))
        assert timeless(read_reply(opened)) == expected[0]
    assert unusual == []


def test_large_messages(checkpoint: Checkpoint) -> None:
    """Buffers grow, and what comes behind a large message is not lost."""
    with expert_server(loaded_store(checkpoint, "float32"), row_credits=4096) as server:
        caller = Caller(server, 8)
        messages = [caller.message(rows) for rows in (1, 4096, 2, 2000, 1)]
        with connection_to(server) as opened:
            sender = threading.Thread(
                target=opened.sendall, args=(b"".join(map(framed, messages)),), name="test-sender"
            )
            sender.start()
            replies = [timeless(read_reply(opened)) for _ in messages]
            sender.join(TIMEOUT_S)
        assert replies == [reply_of_python(server, message) for message in messages]


def test_time_that_is_used_up(server: ExpertServer) -> None:
    """A microsecond is over before a call is computed, and one that waits for long is dropped."""
    with connection_to(server) as opened:
        reply = ask(opened, request(server, time_left_us=1).SerializeToString())
        assert reply.error.code == E.CODE_DEADLINE_EXCEEDED
        assert "time_left_us is 1," in reply.error.message
        with busy_device(server):
            reply = ask(opened, request(server, time_left_us=20_000).SerializeToString())
        assert reply.error.code == E.CODE_DEADLINE_EXCEEDED
        reply = ask(opened, request(server, time_left_us=2**32 - 1).SerializeToString())
        assert reply.HasField("outputs")


def test_calls_meet_in_the_queue(
    server: ExpertServer, unusual: list[pb.ForwardRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the device is busy, calls wait where they are merged; later ones do not."""
    merged: list[int] = []
    compute = server.backend._queue._compute
    monkeypatch.setattr(
        server.backend._queue, "_compute", lambda jobs: merged.append(len(jobs)) or compute(jobs)
    )
    message = request(server).SerializeToString()
    with connection_to(server) as first, connection_to(server) as second:
        with busy_device(server):
            for opened in (first, second):
                opened.sendall(framed(message))
            poll(lambda: server.state.calls_in_flight == 2, timeout_s=TIMEOUT_S, what="both wait")
            assert server.state.load().queued_calls == 1
        replies = [read_reply(opened) for opened in (first, second)]
        assert all(reply.HasField("outputs") and reply.queue_us > 0 for reply in replies)
        assert replies[0].outputs.data == replies[1].outputs.data
        assert merged == [1, 2]
        assert len(unusual) == 2
        assert ask(first, message).outputs.data == replies[0].outputs.data
        assert len(unusual) == 2
    assert sum(server.state.load().calls_by_wait) == 3


def test_connections_side_by_side(server: ExpertServer) -> None:
    """Each gets the replies to its own calls, whoever computes them."""
    caller = Caller(server, 4)
    messages = [
        [caller.message(1 + (n + c) % 50, step=n, layer=n % 3) for n in range(60)] for c in range(3)
    ]
    expected = [[reply_of_python(server, one) for one in group] for group in messages]
    before = server.state.load()

    def run(group: list[bytes]) -> list[bytes]:
        with connection_to(server) as opened:
            return [timeless(ask(opened, message)) for message in group]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, messages)) == expected
    after = server.state.load()
    assert after.calls - before.calls == 180
    assert after.rows == 2 * before.rows
    assert server.state.wait_idle(TIMEOUT_S)


def test_counters_outlive_connections(server: ExpertServer) -> None:
    """What a connection counted is there while it is open, and after its end."""
    message = request(server).SerializeToString()
    for calls in (1, 2):
        with connection_to(server) as opened:
            ask(opened, message)
            assert server.state.load().calls == calls
        poll(lambda: not server.state._connections, timeout_s=TIMEOUT_S, what="it has ended")
        assert server.state.load().calls == calls
        assert server.state.pairs_LE()[1].tolist() == [calls, calls, 0, calls, 0, 0, 0, 0]


def test_drain_under_load(server: ExpertServer) -> None:
    """Once the worker refuses and is idle, no call is computed any more; each got its answer."""
    message = request(server).SerializeToString()
    answers: list[list[pb.ForwardResponse]] = [[], []]

    def run(seen: list[pb.ForwardResponse]) -> None:
        with connection_to(server) as opened:
            while not seen or seen[-1].HasField("outputs"):
                seen.append(ask(opened, message))

    workers = [threading.Thread(target=run, args=(seen,), name="test-caller") for seen in answers]
    for worker in workers:
        worker.start()
    poll(lambda: server.state.load().calls > 200, timeout_s=TIMEOUT_S, what="calls")
    server.state.refuse_calls()
    assert server.state.wait_idle(TIMEOUT_S)
    calls = server.state.load().calls
    for worker in workers:
        worker.join(TIMEOUT_S)
    assert server.state.load().calls == calls == sum(len(seen) - 1 for seen in answers)
    assert [seen[-1].error.code for seen in answers] == [E.CODE_DRAINING] * 2


def test_experts_that_come_and_go(server: ExpertServer) -> None:
    """Loading and unloading while calls run: right outputs, or the name of what is missing."""
    message = request(server).SerializeToString()
    expected = reply_of_python(server, message)
    ended = threading.Event()

    def move() -> None:
        store = server.state.store
        for _ in range(40):
            store.retire(1, 3)
            store.unload(1, 3, TIMEOUT_S)
            store.load(1, 3)
        ended.set()

    mover = threading.Thread(target=move, name="test-mover")
    with connection_to(server) as opened:
        mover.start()
        while not ended.is_set():
            reply = ask(opened, message)
            if reply.HasField("outputs"):
                assert timeless(reply) == expected
            else:
                assert "layer 1 expert 3" in reply.error.message
        mover.join(TIMEOUT_S)
        assert timeless(ask(opened, message)) == expected


def test_an_expert_that_comes_waits_for_no_call(
    server: ExpertServer, unusual: list[pb.ForwardRequest]
) -> None:
    """It is loaded while the device computes, and compiled code finds it."""
    message = request(server)
    message.expert_ids = np.array([0, 5, 1], np.uint32).tobytes()
    with ThreadPoolExecutor(1, "test-loader") as pool, busy_device(server):
        pool.submit(server.state.store.load, 1, 5).result(TIMEOUT_S)
        assert 5 in server.state.store.residency()[1].resident
    with connection_to(server) as opened:
        reply = ask(opened, message.SerializeToString())
    assert unusual == []
    assert timeless(reply) == reply_of_python(server, message.SerializeToString())


def test_compiled_code_that_fails_harms_its_connection_alone(
    server: ExpertServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without memory in the middle of a call: the connection ends, the device is free, and others
    are answered."""
    message = request(server).SerializeToString()
    expected = reply_of_python(server, message)

    def fails(fd: int, words: object, memory: object, shared: Shared, *_: object) -> int:
        device, _, _, in_flight = shared
        assert take(device, 0)
        add(in_flight, 1)
        raise MemoryError

    with connection_to(server) as other, connection_to(server) as opened:
        assert timeless(ask(other, message)) == expected
        with monkeypatch.context() as patched:
            patched.setattr(compiled_calls, "serve", fails)
            with connection_to(server) as unlucky:
                unlucky.sendall(framed(message))
                with contextlib.suppress(ConnectionResetError):  # as the call was not read
                    assert unlucky.recv(10) == b""
        assert server.state.calls_in_flight == 0
        assert timeless(ask(other, message)) == expected
        assert timeless(ask(opened, message)) == expected
    assert "a direct connection failed" in caplog.text


def test_hanging_up_ends_the_thread(server: ExpertServer) -> None:
    """Compiled code that waits for a call ends with its stream."""
    direct = [name for name in _names() if name.startswith("direct-")]
    with connection_to(server) as opened:
        ask(opened, request(server).SerializeToString())
        assert len([name for name in _names() if name.startswith("direct-")]) == len(direct) + 1
        opened.shutdown(socket.SHUT_WR)
        assert opened.recv(10) == b""
    poll(
        lambda: len([name for name in _names() if name.startswith("direct-")]) == len(direct),
        timeout_s=TIMEOUT_S,
        what="its thread ends",
    )


def _names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_warm_up_counts_nothing(server: ExpertServer, unusual: list[pb.ForwardRequest]) -> None:
    """It goes all the way through the compiled code."""
    server.warm_up(1, 2)
    assert _counted(server) == [0] * len(_counted(server))
    assert unusual == []
