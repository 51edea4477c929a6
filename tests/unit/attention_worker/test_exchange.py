"""The exchange: the same bytes as Python's, the same bits, and out of the way when it must be."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch

from attention_worker.call_times import CallTimes
from attention_worker.exchange import Dispatch, Exchange, Exchanged
from attention_worker.expert_routes import LayerTable
from attention_worker.loopback import Loopback
from attention_worker.remote_call import Progress, RemoteCall
from attention_worker.row_writer import row_writer
from expertmesh import direct
from expertmesh.checksum import SEAL_BYTES, sealed
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
    frame_of,
)
from expertmesh.wire_forward import view_outputs
from expertmesh_kernels.combine import combine
from expertmesh_kernels.cpu import exchange_words as words
from expertmesh_kernels.dispatch import plan_dispatch
from expertmesh_kernels.host import TORCH_DTYPES
from expertmesh_kernels.router import Routing
from tests.support.expert_work import (
    TIMEOUT_S,
)
from tests.support.processes import poll

HIDDEN, NUM_EXPERTS, TOP_K = 24, 8, 3
FINGERPRINT = 2**64 - 5
STEP_ID = CallId(gateway=2**63 + 9, epoch=300, step=70_000, layer=0, micro_batch=0)
LAYER = 5
DTYPES: tuple[DtypeName, ...] = ("float32", "bfloat16", "float16")


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
        exchange = Exchange(HIDDEN, dtype, FINGERPRINT, CallTimes(), refuse)
        exchange.warm_up()
        table = LayerTable(True, table_E, table_E[:, np.newaxis], np.ones(num_workers, np.int64))
        exchange.begin_step(STEP_ID, Table(streams, {LAYER: table}))
        yield Bench(exchange, dtype, streams, [theirs for _, theirs in pairs], table_E)


def dispatch(num_rows: int, dtype: DtypeName, seed: int = 0, timeout_s: float = 20.0) -> Dispatch:
    """Random rows and routing."""
    rng = np.random.default_rng(seed)
    hidden_TH = torch.from_numpy(rng.standard_normal((num_rows, HIDDEN), np.float32))
    ids_TK = np.argsort(rng.random((num_rows, NUM_EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    weights_TK = rng.random((num_rows, TOP_K), np.float32)
    routing = Routing.of(np.ascontiguousarray(ids_TK), weights_TK, NUM_EXPERTS)
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
    parts: Parts = encode_reply(head, bits, dtype)
    response = pb.ForwardResponse.FromString(b"".join(parts)[LENGTH.size :])
    if change is nothing:
        return b"".join(parts), bits
    change(response)
    response.ClearField("checksum")
    return b"".join(frame_of(sealed(response.SerializeToString()))), bits


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
            for at in rng.integers(LENGTH.size, near - SEAL_BYTES, 1 + seed % 2):
                reply[at] = rng.integers(256)
            reply[LENGTH.size :] = sealed(reply[LENGTH.size : -SEAL_BYTES])
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


def test_flipped_bits() -> None:
    """A reply of which any one bit is another is not taken, and is there for Python to read."""
    with bench(num_workers=1) as there:
        num_bits = 8 * len(reply_to_first(there))
        for bit in range(8 * LENGTH.size, num_bits, 5):
            sent = there.send(1)
            reply = bytearray(reply_to(there.frame(0), "float32", 0, nothing)[0])
            reply[bit // 8] ^= 1 << bit % 8
            there.peers[0].sendall(reply)
            with pytest.raises(TakenOverError):
                sent.result()
            connection = there.streams[0].open_exchange()
            assert connection is not None
            assert [LENGTH.pack(len(m)) + m for m in connection.receive()] == [bytes(reply)]


def reply_to_first(there: Bench) -> bytes:
    """A reply that was taken."""
    sent = there.send(1)
    reply, _ = reply_to(there.frame(0), "float32", 0, nothing)
    there.peers[0].sendall(reply)
    sent.result()
    return reply


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
    with bench(num_workers=2) as there:
        for is_fixed, limit_s in ((True, 0.3), (False, 0.1)):
            both_ER = np.zeros((NUM_EXPERTS, 2), np.int32)
            both_ER[:, 1] = 1
            table = LayerTable(is_fixed, there.table_E, both_ER, np.ones(2, np.int64))
            there.exchange.begin_step(STEP_ID, Table(there.streams, {LAYER: table}))
            started_s = time.monotonic()
            sent = there.exchange.send(dispatch(4, "float32", timeout_s=0.3))
            assert sent is not None
            with pytest.raises(TakenOverError):
                sent.result()
            assert limit_s <= time.monotonic() - started_s < limit_s + 0.2
            frame = there.frame(0)
            request = pb.ForwardRequest.FromString(frame[LENGTH.size :])
            assert 0.2 < request.time_left_us / 1e6 <= 0.3, "who is late may answer all the same"


def test_who_did_not_run_takes_what_has_come() -> None:
    """A reply that is there is not late, even if we look for it after the deadline."""
    with bench(num_workers=1) as there:
        sent = there.exchange.send(dispatch(4, "float32", timeout_s=0.01))
        assert sent is not None
        there.peers[0].sendall(reply_to(there.frame(0), "float32", 0, nothing)[0])
        poll(
            lambda: time.monotonic() > sent.dispatch.deadline_s, timeout_s=5.0, what="the deadline"
        )
        assert sent.result().shape == (4, HIDDEN)


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
