"""The exchange: the same bytes as Python's, the same bits, and out of the way when it must be."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch

from attention_worker.exchange import Dispatch, Exchange, Exchanged
from attention_worker.expert_routes import LayerTable
from attention_worker.experts import RemoteExperts
from attention_worker.loopback import Loopback
from attention_worker.remote_call import Progress, RemoteCall
from attention_worker.row_writer import row_writer
from expertmesh import direct
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import ExpertUnavailableError
from expertmesh.model_config import DtypeName
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import NUMPY_DTYPES, RawArray
from expertmesh.wire_encode import (
    LENGTH,
    CallId,
    CallTarget,
    Parts,
    ReplyHead,
    RequestFrame,
    encode_reply,
)
from expertmesh.wire_forward import view_outputs
from expertmesh_kernels.combine import combine
from expertmesh_kernels.cpu import exchange_words as words
from expertmesh_kernels.dispatch import plan_dispatch
from expertmesh_kernels.host import TORCH_DTYPES
from expertmesh_kernels.router import Routing
from tests.conftest import Models
from tests.support.expert_servers import Answer, faulty_server, loaded_store, map_of
from tests.support.expert_work import (
    TIMEOUT_S,
    Work,
    changed,
    local,
    remote,
    right,
    silent,
    work,
)
from tests.support.processes import poll
from tests.support.tiny_checkpoints import MIXTRAL

HIDDEN, NUM_EXPERTS, TOP_K = 24, 8, 3
FINGERPRINT = 2**64 - 5
STEP_ID = CallId(gateway=2**63 + 9, epoch=300, step=70_000, layer=0, micro_batch=0)
LAYER = 5
DTYPES: tuple[DtypeName, ...] = ("float32", "bfloat16", "float16")


@pytest.fixture(scope="module")
def checkpoint(models: Models) -> Checkpoint:
    """A tiny Mixtral: 3 layers, 8 experts, top-2."""
    return Checkpoint.open(models.tiny(MIXTRAL))


@dataclass(frozen=True)
class Table:
    """Routes of one layer."""

    streams: Sequence[Loopback]
    tables: Mapping[int, LayerTable]


class TakenOverError(Exception):
    """The exchange could not go on."""


def refuse(dispatch: Dispatch, progress: Progress) -> RemoteCall:
    raise TakenOverError([part.rows.worker for part in progress.sent])


@dataclass(frozen=True)
class Bench:
    """An exchange and the other ends of its connections."""

    exchange: Exchange
    dtype: DtypeName
    streams: Sequence[Loopback]
    peers: Sequence[socket.socket]
    table_E: npt.NDArray[np.int32]

    def send(self, num_rows: int, seed: int = 0) -> Exchanged:
        """Random rows on their way."""
        sent = self.exchange.send(dispatch(num_rows, self.dtype, seed))
        assert sent is not None
        return sent

    def frame(self, worker: int) -> bytes:
        """What has come to an expert worker."""
        return self.peers[worker].recv(2**20)


@contextmanager
def bench(dtype: DtypeName = "float32", num_workers: int = 2) -> Iterator[Bench]:
    """Experts are shared out in turn."""
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(num_workers)]
        for ours, theirs in pairs:
            stack.enter_context(ours)
            stack.enter_context(theirs).settimeout(TIMEOUT_S)
            ours.setblocking(False)
        streams = [Loopback(ours, theirs, credits=100) for ours, theirs in pairs]
        table_E = (np.arange(NUM_EXPERTS) % num_workers).astype(np.int32)
        exchange = Exchange(HIDDEN, dtype, FINGERPRINT, refuse)
        exchange.warm_up()
        table = LayerTable(table_E, np.zeros(NUM_EXPERTS, np.bool_))
        exchange.begin_step(STEP_ID, Table(streams, {LAYER: table}))
        yield Bench(exchange, dtype, streams, [theirs for _, theirs in pairs], table_E)


def dispatch(num_rows: int, dtype: DtypeName, seed: int = 0, timeout_s: float = 20.0) -> Dispatch:
    """Random rows and routing."""
    rng = np.random.default_rng(seed)
    hidden_TH = torch.from_numpy(rng.standard_normal((num_rows, HIDDEN), np.float32))
    ids_TK = np.argsort(rng.random((num_rows, NUM_EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    routing = Routing(np.ascontiguousarray(ids_TK), rng.random((num_rows, TOP_K), np.float32))
    deadline_s = time.monotonic() + timeout_s
    return Dispatch(
        LAYER, 200, hidden_TH.to(TORCH_DTYPES[dtype]), routing, num_rows // 2, deadline_s
    )


def reply_to(
    frame: bytes, dtype: DtypeName, seed: int, change: Callable[[pb.ForwardResponse], object]
) -> tuple[bytes, RawArray]:
    """A framed reply with random outputs; those outputs."""
    request = pb.ForwardRequest.FromString(frame[LENGTH.size :])
    shape = (len(request.expert_ids) // 4, HIDDEN)
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    outputs = torch.from_numpy(values).to(TORCH_DTYPES[dtype])
    bits = outputs.view(torch.uint8).numpy().view(NUMPY_DTYPES[dtype])
    head = ReplyHead(request.id.SerializeToString(), 1, 7, 1234 + seed, 90)
    parts: Parts = encode_reply(head, bits, dtype, crc=False)
    response = pb.ForwardResponse.FromString(b"".join(parts)[LENGTH.size :])
    if change is nothing:
        return b"".join(parts), bits
    change(response)
    message = response.SerializeToString()
    return LENGTH.pack(len(message)) + message, bits


def nothing(response: pb.ForwardResponse) -> None:
    """Changes nothing."""


def expected_frame(
    todo: Dispatch, table_E: npt.NDArray[np.int32], worker: int, frame: bytes
) -> bytes:
    """What Python writes, with the time that is left according to the frame."""
    request = pb.ForwardRequest.FromString(frame[LENGTH.size :])
    (rows,) = (
        part
        for part in plan_dispatch(todo.routing.topk_ids_TK, table_E, todo.num_generated_rows)
        if part.worker == worker
    )
    call_id = STEP_ID._replace(layer=todo.layer, micro_batch=todo.micro_batch)
    dtype: DtypeName = next(name for name in DTYPES if TORCH_DTYPES[name] == todo.hidden_TH.dtype)
    expected = RequestFrame(
        call_id, CallTarget(1, FINGERPRINT), rows, HIDDEN, dtype, time_left_us=request.time_left_us
    )
    broken_T = np.zeros(len(todo.hidden_TH), np.bool_)
    row_writer(todo.hidden_TH, dtype)(rows.row_ids_R, expected, broken_T)
    expected.finish()
    return bytes(expected.framed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_bytes_and_bits_are_those_of_python(dtype: DtypeName, num_workers: int) -> None:
    """For random rows, some of them not finite: requests byte by byte, results bit by bit."""
    with bench(dtype, num_workers) as there:
        for seed, num_rows in enumerate((1, 2, 33, 5)):
            todo = dispatch(num_rows, dtype, seed)
            broken = [row for row in range(num_rows) if row % 7 == 3]
            todo.hidden_TH[broken, 2] = torch.inf
            sent = there.exchange.send(todo)
            assert sent is not None
            outputs_SH = np.zeros((num_rows * TOP_K, HIDDEN), NUMPY_DTYPES[dtype])
            plan = plan_dispatch(todo.routing.topk_ids_TK, there.table_E, todo.num_generated_rows)
            for rows in plan:
                frame = there.frame(rows.worker)
                assert frame == expected_frame(todo, there.table_E, rows.worker, frame)
                reply, outputs = reply_to(frame, dtype, seed + rows.worker, nothing)
                outputs_SH[rows.slot_ids_N] = outputs
                there.peers[rows.worker].sendall(reply)
            combined_TH = sent.result()
            slots = torch.from_numpy(outputs_SH).view(TORCH_DTYPES[dtype])
            expected_TH = combine(slots, todo.routing.topk_weights_TK)
            expected_TH[broken] = torch.nan
            same = combined_TH.view(torch.uint8), expected_TH.view(torch.uint8)
            assert torch.equal(*same)
            assert sent.busy_s == max(1234 + seed + rows.worker for rows in plan) / 1e6


def test_replies_come_in_any_pieces() -> None:
    """Byte by byte, and several at a time; what follows a reply is kept for who reads next."""
    with bench() as there:
        sent = there.send(5)
        replies = [
            reply_to(there.frame(worker), "float32", worker, nothing)[0] for worker in (0, 1)
        ]

        def drip() -> None:
            for byte in replies[0]:
                there.peers[0].sendall(bytes((byte,)))

        there.peers[1].sendall(replies[1] + replies[1])
        thread = threading.Thread(target=drip, name="test-drip")
        thread.start()
        first_TH = sent.result()
        thread.join(TIMEOUT_S)
        direct_1 = there.streams[1].open_exchange()
        assert direct_1 is not None
        assert [LENGTH.pack(len(m)) + m for m in direct_1.receive()] == [replies[1]]
        sent = there.send(5)
        for worker, reply in enumerate(replies):
            there.frame(worker)
            there.peers[worker].sendall(reply)
        assert torch.equal(first_TH, sent.result())


def wrong_id(field: str) -> Callable[[pb.ForwardResponse], object]:
    return lambda reply: setattr(reply.id, field, 3)


WRONG: dict[str, Callable[[pb.ForwardResponse], object]] = {
    "no result": lambda r: r.ClearField("outputs"),
    "error": lambda r: r.error.MergeFrom(pb.ForwardError(message="no")),
    "no id": lambda r: r.ClearField("id"),
    "incarnation": lambda r: setattr(r, "incarnation", 2),
    **{f"{field} of the id": wrong_id(field) for field in CallId._fields},
    "dtype": lambda r: setattr(r.outputs, "dtype", pb.DTYPE_BFLOAT16),
    "rows": lambda r: r.outputs.shape.__setitem__(0, 2),
    "width": lambda r: r.outputs.shape.__setitem__(1, HIDDEN + 1),
    "one extent": lambda r: r.outputs.shape.pop(),
    "three extents": lambda r: r.outputs.shape.append(1),
    "no data": lambda r: r.outputs.ClearField("data"),
    "short data": lambda r: setattr(r.outputs, "data", r.outputs.data[:-4]),
    "CRC": lambda r: setattr(r.outputs, "crc32", 5),
    "scales": lambda r: setattr(r.outputs, "row_scales", b"1234"),
    "not finite": lambda r: setattr(
        r.outputs, "data", r.outputs.data[:-4] + np.float32(np.nan).tobytes()
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_reply_is_left_to_python(name: str) -> None:
    """It is not taken and is still there to be read; the other call counts as answered."""
    with bench() as there:
        sent = there.send(4)
        there.peers[0].sendall(reply_to(there.frame(0), "float32", 0, nothing)[0])
        wrong, _ = reply_to(there.frame(1), "float32", 1, WRONG[name])
        there.peers[1].sendall(wrong)
        poll_readable(there.streams[0])
        with pytest.raises(TakenOverError, match=r"\[1\]"):
            sent.result()
        connection = there.streams[1].open_exchange()
        assert connection is not None
        assert [LENGTH.pack(len(m)) + m for m in connection.receive()] == [wrong]


def test_replies_with_wrong_bytes() -> None:
    """Any byte may be another: what is taken is what a parser finds, and else it is left alone."""
    rng = np.random.default_rng(5)
    num_taken = 0
    with bench(num_workers=1) as there:
        for seed in range(300):
            todo = dispatch(1, "float32", seed)
            sent = there.exchange.send(todo)
            assert sent is not None
            reply = bytearray(reply_to(there.frame(0), "float32", seed, nothing)[0])
            near = len(reply) if seed % 3 else 90  # most of a reply is data
            for at in rng.integers(LENGTH.size, near, 1 + seed % 2):
                reply[at] = rng.integers(256)
            there.peers[0].sendall(reply)
            try:
                combined_TH = sent.result()
            except TakenOverError:
                connection = there.streams[0].open_exchange()
                assert connection is not None
                assert [LENGTH.pack(len(m)) + m for m in connection.receive()] == [bytes(reply)]
                continue
            num_taken += 1
            response = pb.ForwardResponse.FromString(bytes(reply[LENGTH.size :]))
            shape = (TOP_K, HIDDEN)
            assert CallId.of(response.id) == STEP_ID._replace(layer=LAYER, micro_batch=200)
            outputs_NH = torch.from_numpy(view_outputs(response, shape, "float32").copy())
            outputs_SH = outputs_NH[np.argsort(np.argsort(todo.routing.topk_ids_TK[0]))]
            assert torch.equal(combined_TH, combine(outputs_SH, todo.routing.topk_weights_TK))
    assert 50 < num_taken < 250


def poll_readable(stream: Loopback) -> None:
    """Until something has come."""
    connection = stream.open_exchange()
    assert connection is not None
    poll(
        lambda: bool(connection._socket.recv(1, socket.MSG_PEEK)), timeout_s=TIMEOUT_S, what="data"
    )


@pytest.mark.parametrize(
    "data", [b"\2\0\0\0\xff\xff", LENGTH.pack(2**32 - 1), LENGTH.pack(2**19) + b"x"]
)
def test_bytes_that_are_no_reply_are_left_to_python(data: bytes) -> None:
    """Bytes that are no message, and lengths that no buffer has."""
    with bench(num_workers=1) as there:
        sent = there.send(4)
        there.peers[0].sendall(data)
        with pytest.raises(TakenOverError):
            sent.result()


@pytest.mark.alone
def test_deadline() -> None:
    """It ends the wait, and so does a share of it where other copies could be asked."""
    with bench(num_workers=1) as there:
        for has_copies, limit_s in ((False, 0.3), (True, 0.1)):
            table = LayerTable(there.table_E, np.full(NUM_EXPERTS, has_copies))
            there.exchange.begin_step(STEP_ID, Table(there.streams, {LAYER: table}))
            started_s = time.monotonic()
            sent = there.exchange.send(dispatch(4, "float32", timeout_s=0.3))
            assert sent is not None
            with pytest.raises(TakenOverError):
                sent.result()
            assert limit_s <= time.monotonic() - started_s < limit_s + 0.2
            frame = there.frame(0)
            request = pb.ForwardRequest.FromString(frame[LENGTH.size :])
            assert limit_s - 0.1 < request.time_left_us / 1e6 <= limit_s


def test_what_is_not_as_usual_is_not_sent() -> None:
    """A link that is down, too few credits, an unknown layer, no rows: nothing leaves."""
    with bench() as there:
        usual = dispatch(40, "float32")
        there.streams[1].link.credits = 3
        assert there.exchange.send(usual) is None
        there.streams[1].link.credits = 100
        assert there.exchange.send(usual._replace(layer=LAYER + 1)) is None
        assert there.exchange.send(dispatch(0, "float32")) is None
        there.streams[0].is_up = False
        there.streams[0].link.close()
        assert there.exchange.send(usual) is None
        for peer in there.peers:
            peer.setblocking(False)
            with pytest.raises(BlockingIOError):
                peer.recv(1)


def test_words_are_those_of_python() -> None:
    """Both sides agree about the words of a reader."""
    python = (direct.BUFFER_ADDRESS, direct.BUFFER_SIZE, direct.BUFFER_USED)
    assert python == (words.READER_BUFFER, words.READER_SIZE, words.READER_USED)


# --- with streams ---


def exchanged(there: RemoteExperts, todo: Work, timeout_s: float = TIMEOUT_S) -> Exchanged:
    """A dispatch that is known to have gone the ordinary way."""
    pending = todo.dispatch_on(there, timeout_s)
    assert isinstance(pending, Exchanged)
    return pending


def corrupt(reply: pb.ForwardResponse) -> None:
    reply.outputs.data = b"\xff" * len(reply.outputs.data)


@pytest.mark.parametrize("answer", [changed(corrupt), silent], ids=["not finite", "silent"])
def test_what_was_answered_stays_answered(checkpoint: Checkpoint, answer: Answer) -> None:
    """Only the rows of the call that failed are sent again, to another copy."""
    low, high = (loaded_store(checkpoint, "float32", part) for part in ("0-3", "4-7"))
    todo = work(30)
    with (
        faulty_server(low, right, "a", direct=True) as a,
        faulty_server(high, answer, "b", direct=True) as b,
        faulty_server(high, right, "c", direct=True) as c,
        remote(checkpoint, [a.entry, c.entry], direct=True) as good,
        remote(checkpoint, [a.entry, b.entry, c.entry], direct=True) as there,
    ):
        expected = todo.run(good)  # kernels are compiled now
        pending = exchanged(there, todo, timeout_s=3.0)
        assert torch.equal(expected, pending.result())
        assert [len(server.requests) for server in (a, b, c)] == [2, 1, 3]
        seen = {entry.worker_id: entry for entry in there.observations()}
        assert [(seen[name].calls, seen[name].faults) for name in "abc"] == [(1, 0), (0, 1), (2, 0)]


def test_second_dispatch_and_one_that_is_dropped(checkpoint: Checkpoint) -> None:
    """Two at a time go on in Python; one that nobody waits for is in nobody's way."""
    todo = [work(5, seed=seed, layer=seed) for seed in range(2)]
    expected = [one.run(local(checkpoint)) for one in todo]
    with (
        faulty_server(loaded_store(checkpoint, "float32"), right, direct=True) as server,
        remote(checkpoint, [server.entry], direct=True) as there,
    ):
        first = exchanged(there, todo[0])
        second = todo[1].dispatch_on(there)
        assert not isinstance(second, Exchanged)
        assert torch.equal(expected[1], second.result())
        assert torch.equal(expected[0], first.result())
        exchanged(there, todo[0])
        there.begin_step(2)
        assert torch.equal(expected[0], todo[0].run(there))
        assert torch.equal(expected[1], exchanged(there, todo[1]).result())


def test_connection_that_another_thread_closes(checkpoint: Checkpoint) -> None:
    """The wait ends with the stream's reason, and nobody else gets the descriptor meanwhile."""
    held = threading.Event()

    def hold(request: pb.ForwardRequest, reply: pb.ForwardResponse) -> Iterable[pb.ForwardResponse]:
        held.wait(TIMEOUT_S)
        return []

    with (
        faulty_server(loaded_store(checkpoint, "float32"), hold, direct=True) as server,
        remote(checkpoint, [server.entry], direct=True) as there,
    ):
        pending = exchanged(there, work(4))
        descriptor = there._routes.streams[0].interest[0]
        closing = threading.Timer(0.1, there.close)
        closing.start()
        started_s = time.monotonic()
        with pytest.raises(ExpertUnavailableError, match=r"CANCELLED|closed"):
            pending.result()
        assert time.monotonic() - started_s < TIMEOUT_S / 2
        closing.join(TIMEOUT_S)
        assert os.fstat(descriptor)  # ours until the next step
        held.set()


def test_stream_that_is_retired_meanwhile(checkpoint: Checkpoint) -> None:
    """The step goes on with the map that it began with; the next one has the new map."""
    store = loaded_store(checkpoint, "float32")
    todo = work(6)
    with (
        faulty_server(store, right, "a", direct=True) as a,
        faulty_server(store, right, "b", direct=True) as b,
        remote(checkpoint, [a.entry], direct=True) as there,
    ):
        pending = exchanged(there, todo)
        there.update_map(map_of(checkpoint, [b.entry]), gateway=77)
        assert torch.equal(todo.run(local(checkpoint)), pending.result())
        assert torch.equal(todo.run(local(checkpoint)), exchanged(there, todo).result())
        there.begin_step(2)
        assert torch.equal(todo.run(local(checkpoint)), todo.run(there))
        assert (len(a.requests), len(b.requests)) == (2, 1)
