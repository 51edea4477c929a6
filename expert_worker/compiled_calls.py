"""Direct connections answered by compiled code, call after call, without the GIL.

See `expertmesh_kernels.cpu.serve`. What it does not take is answered here as it is for streams, in
the same thread, by the servicer; that way stays the reference, and says what is wrong with a call.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from expert_worker.call_counters import ROWS_BUCKETS, CallCounters
from expert_worker.device_turn import DeviceTurn
from expert_worker.direct_server import Answer, check_framing
from expert_worker.published_experts import PublishedExperts
from expert_worker.servicer import ExpertServicer
from expert_worker.state import WorkerState
from expertmesh.direct import DirectConnectionError, is_connected, send_parts
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import WIRE_CODES, WIRE_NUMPY, Received, sealed_receiver
from expertmesh.wire_encode import LENGTH, Parts
from expertmesh_kernels.cpu import frames
from expertmesh_kernels.cpu.forward_call import Limits
from expertmesh_kernels.cpu.serve import (
    ALIGNMENT,
    BEGAN_NS,
    GATEWAY,
    NUM_WORDS,
    STEP,
    UNUSUAL,
    Likes,
    Shared,
    serve,
)
from expertmesh_kernels.cpu.words import add
from expertmesh_kernels.dispatch import BITS_DTYPES, EXPONENTS
from expertmesh_kernels.host import LIKE, TORCH_DTYPES

_BUFFER_BYTES = 256 * 1024
_NS = 1e9


class CompiledCalls:
    """Answers calls of connections, each in the thread that calls `answer_all`.

    Args:
        state: The expert worker.
        published: Its experts.
        turn: Of its device.
        servicer: Answers calls that are not ordinary.
        max_message_bytes: Longest call.
    """

    def __init__(
        self,
        state: WorkerState,
        published: PublishedExperts,
        turn: DeviceTurn,
        servicer: ExpertServicer,
        max_message_bytes: int,
    ) -> None:
        limits = servicer.limits
        dtype = limits.dtype
        self._state = state
        self._turn = turn
        self._servicer = servicer
        self._parse = sealed_receiver(pb.ForwardRequest)
        self.experts = published.tables
        self.likes: Likes = LIKE[TORCH_DTYPES[dtype]], np.empty(0, BITS_DTYPES[dtype])
        numbers = Limits(
            incarnation=limits.incarnation,
            model_fingerprint=limits.model_fingerprint,
            dtype_code=WIRE_CODES[dtype],
            itemsize=WIRE_NUMPY[dtype].itemsize,
            hidden_size=limits.hidden_size,
            max_rows=limits.max_rows,
            max_message_bytes=max_message_bytes,
            exponent=EXPONENTS[dtype],
            row_credits=state.identity.row_credits,
        )
        self.limits: npt.NDArray[np.int64] = np.array(numbers, np.uint64).view(np.int64)
        self.buckets = np.array(ROWS_BUCKETS, np.int64)

    def answer_all(self, connection: socket.socket) -> None:
        """Answers calls in order until the connection ends.

        Raises:
            DirectConnectionError: The peer closed it, or announced too long a message.
            OSError: It is lost.
        """
        with self._state.connection() as counters:
            self._run(connection, counters, self._servicer.answer)

    def warm_up(self, message: bytes) -> None:
        """Answers a call through sockets, so that all is compiled; counts nothing."""
        counters = self._state.new_counters()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(LENGTH.pack(len(message)) + message)
            ours.shutdown(socket.SHUT_WR)
            with _until_closed():
                self._run(theirs, counters, _no_reply)
        assert counters.num_in_flight == 0

    def shared(self, counters: CallCounters) -> Shared:
        """Addresses of the words that threads share."""
        return (
            self._turn.device,
            self._turn.wanted,
            self._state.refusing.ctypes.data,
            counters.in_flight.ctypes.data,
        )

    def _run(self, connection: socket.socket, counters: CallCounters, answer: Answer) -> None:
        served = _Connection(self, connection, counters)
        while True:
            try:
                end = served.run()
            except MemoryError:
                self._give_up_call(counters)
                raise
            if end == UNUSUAL:
                received = self._take_unusual(served)
                wanted = replace(received, is_wanted=lambda: is_connected(connection))
                reply = answer(wanted)
                if not is_connected(connection):  # else what has come already would be computed
                    raise DirectConnectionError("the peer has closed it")
                send_parts(connection, reply)
                check_framing(received)
            elif end == frames.NEEDS_MEMORY:
                served.grow()
            else:
                raise served.error(end)

    def _give_up_call(self, counters: CallCounters) -> None:
        """Compiled code ran out of memory in the middle of it: the device is for others again."""
        if counters.num_in_flight:
            self._turn.give_back()
            add(counters.in_flight.ctypes.data, -1)

    def _take_unusual(self, served: _Connection) -> Received[pb.ForwardRequest]:
        message, words = served.take_message(), served.words
        gateway, step = (int(words[n]) % 2**64 for n in (GATEWAY, STEP))
        if words[BEGAN_NS]:
            self._servicer.ages.age_s(gateway, step, float(words[BEGAN_NS]) / _NS)
        received_s = float(words[frames.RECEIVED_NS]) / _NS
        return replace(self._parse(message), received_s=received_s)


class _Connection:
    """Memory and state of one connection."""

    def __init__(
        self, calls: CompiledCalls, connection: socket.socket, counters: CallCounters
    ) -> None:
        self.words = np.zeros(NUM_WORDS, np.int64)
        self._memory = tuple(_aligned_bytes(size) for size in (_BUFFER_BYTES, 0, 0))
        self._calls = calls
        self._fd = connection.fileno()
        self._shared = calls.shared(counters)
        self._counters = counters  # keeps what compiled code adds to
        self._counts = (calls.buckets, counters.work, counters.rows_histogram, counters.pairs_LE)

    def run(self) -> int:
        """Answers calls; why it stopped, see `serve`."""
        buffer, scratch, reply = self._memory
        calls = self._calls
        return serve(
            self._fd, self.words, (buffer, scratch, reply), self._shared, calls.limits,
            calls.experts, self._counts, calls.likes,
        )  # fmt: skip

    def take_message(self) -> bytes:
        """The message at hand; the next one is at hand from now on."""
        begin, end = self.words[[frames.MESSAGE, frames.MESSAGE_END]].tolist()
        self.words[frames.BEGIN] = end
        return bytes(self._memory[0].data[begin:end])

    def grow(self) -> None:
        """Makes the memory as large as it has to be; what was received stays."""
        needed = self.words[[frames.NEED_BUFFER, frames.NEED_SCRATCH, frames.NEED_REPLY]].tolist()
        larger = []
        for memory, size in zip(self._memory, needed, strict=True):
            if size > memory.size:
                grown = _aligned_bytes(1 << (size - 1).bit_length())
                grown[: memory.size] = memory
                memory = grown
            larger.append(memory)
        self._memory = tuple(larger)

    def error(self, end: int) -> OSError:
        """Why there are no more calls."""
        if end == frames.CLOSED:
            return DirectConnectionError("the connection was closed")
        if end == frames.TOO_LONG:
            most = self._calls.limits[Limits._fields.index("max_message_bytes")]
            return DirectConnectionError(
                f"a message of {self.words[frames.LENGTH]} bytes, expected at most {most}"
            )
        error = int(self.words[frames.ERRNO])
        return OSError(error, os.strerror(error))


def _aligned_bytes(size: int) -> npt.NDArray[np.uint8]:
    memory = np.empty(size + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + size]


def _no_reply(received: Received[pb.ForwardRequest]) -> Parts:
    """For calls that only warm up."""
    return []


@contextmanager
def _until_closed() -> Iterator[None]:
    """A context in which a connection may end."""
    try:
        yield
    except DirectConnectionError:
        return
