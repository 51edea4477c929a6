"""The ordinary case of a dispatch: two calls of compiled code instead of some hundred of Python.

Ordinary is a dispatch whose expert workers all have a direct connection, can be used, and owe
nobody an answer; there is one at a time. All else goes through `RemoteCall`, as does a dispatch
that turns out not to be ordinary while its rows are on their way: what was answered stays answered,
and the rest is waited for, retried and reported there.

Owner: the model thread. T tokens, K top-k, E experts, W expert workers, S = T * K slots, H hidden
size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attention_worker.call_times import CallTimes
from attention_worker.calls import Progress, SentRows, Unfinished
from attention_worker.direct_connection import DirectConnection
from attention_worker.expert_routes import LayerTable
from attention_worker.link import Link
from attention_worker.loopback import LoopbackRoutes, loopback
from attention_worker.remote_call import RemoteCall
from expertmesh.model_config import DtypeName
from expertmesh.wire import WIRE_CODES
from expertmesh.wire_encode import CallId
from expertmesh_kernels.cpu import exchange_words as words
from expertmesh_kernels.cpu.exchange_receive import receive
from expertmesh_kernels.cpu.exchange_send import send
from expertmesh_kernels.cpu.exchange_words import Route
from expertmesh_kernels.decoder_layers import ExchangeWords, LayerRoutes
from expertmesh_kernels.dispatch import EXPONENTS, Bits, Bools, WorkerRows, empty_bits
from expertmesh_kernels.host import LIKE, TORCH_DTYPES, as_input
from expertmesh_kernels.router import Routing

MAX_BYTES = 2**25
"""Of the messages or of the outputs of a dispatch; what is larger takes longer than Python does."""


class Dispatch(NamedTuple):
    """Rows of one micro-batch for the experts of one layer."""

    layer: int
    micro_batch: int
    hidden_TH: Tensor
    routing: Routing
    num_generated_rows: int
    deadline_s: float


TakeOver = Callable[[Dispatch, Progress], RemoteCall]
"""Goes on with a dispatch."""


class Partner(Protocol):
    """A stream to an expert worker, as an exchange sees it."""

    @property
    def link(self) -> Link:
        """What compiled code needs to know."""

    def open_exchange(self) -> DirectConnection | None:
        """The connection, if compiled code may use it from now on."""


class Partners(Protocol):
    """Where a step's rows go."""

    @property
    def streams(self) -> Sequence[Partner]:
        """By expert worker."""

    @property
    def tables(self) -> Mapping[int, LayerTable]:
        """By layer."""


@dataclass(frozen=True)
class Workspace:
    """Memory for one dispatch; it goes to the `RemoteCall` that takes the dispatch over."""

    row_ids: npt.NDArray[np.int64]
    row_offsets: npt.NDArray[np.uint32]
    expert_ids: npt.NDArray[np.uint32]
    slot_ids: npt.NDArray[np.int64]
    """The four of `WorkerRows`, of all expert workers one after the other."""
    frames: npt.NDArray[np.uint8]
    outputs_SH: Bits
    broken_T: Bools

    def write_addresses(self, state: npt.NDArray[np.int64]) -> None:
        """Tells compiled code where it is."""
        state[words.STATE_ROW_IDS] = self.row_ids.ctypes.data
        state[words.STATE_ROW_OFFSETS] = self.row_offsets.ctypes.data
        state[words.STATE_EXPERT_IDS] = self.expert_ids.ctypes.data
        state[words.STATE_SLOT_IDS] = self.slot_ids.ctypes.data
        state[words.STATE_FRAMES] = self.frames.ctypes.data
        state[words.STATE_OUTPUTS] = self.outputs_SH.ctypes.data
        state[words.STATE_BROKEN] = self.broken_T.ctypes.data

    def rows_of(self, worker: int, call: Sequence[int]) -> WorkerRows:
        """What an expert worker got, by its words."""
        row, num_rows = call[words.CALL_FIRST_ROW], call[words.CALL_ROWS]
        pairs = slice(
            call[words.CALL_FIRST_PAIR], call[words.CALL_FIRST_PAIR] + call[words.CALL_PAIRS]
        )
        return WorkerRows(
            worker,
            self.row_ids[row : row + num_rows],
            self.row_offsets[row + worker : row + worker + num_rows + 1],
            self.expert_ids[pairs],
            self.slot_ids[pairs],
            call[words.CALL_GENERATED],
        )

    def unsent(self, call: Sequence[int]) -> memoryview:
        """The rest of a frame."""
        return self.frames.data[call[words.CALL_SEND_AT] : call[words.CALL_SEND_END]]


class Exchanged:
    """A dispatch that compiled code sent. What its result needs is made while rows travel."""

    __slots__ = ("_exchange", "busy_s", "combined_TH", "dispatch", "taken_over", "weights_TK")

    def __init__(self, exchange: Exchange, dispatch: Dispatch) -> None:
        self._exchange = exchange
        self.dispatch = dispatch
        self.weights_TK = as_input(dispatch.routing.topk_weights_TK, np.float32)
        self.combined_TH = torch.empty_like(dispatch.hidden_TH)
        """Takes the result."""
        self.taken_over: RemoteCall | None = None
        """Who waits for it, if it is not the exchange."""
        self.busy_s = 0.0
        """See Pending."""

    def result(self) -> Tensor:
        """See Pending."""
        if self.taken_over is None and self._exchange.receive(self):
            return self.combined_TH
        assert self.taken_over is not None, "who cannot receive hands over"
        try:
            return self.taken_over.result()
        finally:
            self.busy_s = self.taken_over.busy_s


class NoExchange:
    """Where there is no ordinary case: every dispatch is a `RemoteCall`."""

    def warm_up(self) -> None:
        """There is nothing to compile."""

    def begin_step(self, step_id: CallId, partners: Partners) -> None:
        """There is nothing to prepare."""

    def rest(self) -> None:
        """It does nothing anyway."""

    def hand_over(self) -> None:
        """There is nothing on its way."""

    def send(self, dispatch: Dispatch) -> Exchanged | None:
        """Sends nothing."""
        return None


class Exchange:
    """Sends and receives dispatches as long as all is as it should be.

    Args:
        hidden_size: H.
        dtype: Of rows and outputs, here and on the wire.
        model_fingerprint: What expert workers must serve.
        times: Of calls; more are added.
        take_over: Goes on with what is not ordinary.
    """

    def __init__(
        self,
        hidden_size: int,
        dtype: DtypeName,
        model_fingerprint: int,
        times: CallTimes,
        take_over: TakeOver,
    ) -> None:
        self._hidden_size, self._dtype = hidden_size, dtype
        self._take_over, self._times = take_over, times
        self._like = LIKE[TORCH_DTYPES[dtype]]
        self._row_bytes = hidden_size * self._like.itemsize
        self._state = np.zeros(words.NUM_STATE_WORDS, np.int64)
        self._state[words.STATE_HIDDEN] = hidden_size
        self._state[words.STATE_ITEMSIZE] = self._like.itemsize
        self._state[words.STATE_EXPONENT] = EXPONENTS[dtype]
        self._state[words.STATE_DTYPE] = WIRE_CODES[dtype]
        self._state[words.STATE_FINGERPRINT] = words.signed64(model_fingerprint)
        self._state[words.STATE_TIMES] = times.address
        self._partners: Partners | None = None
        self._streams: Sequence[Partner] = ()
        self._tables: Mapping[int, Route] = {}
        self._routes: dict[tuple[int, int], LayerRoutes] = {}
        self._connections: list[DirectConnection | None] = []  # compiled code uses them
        self._links_W = np.zeros(0, np.int64)
        self._calls_WC = np.zeros((0, words.NUM_CALL_WORDS), np.int64)
        self._workspace: Workspace | None = None
        self._shape = (0, 0)  # [T, K] that the workspace is large enough for
        self._max_bytes = MAX_BYTES
        self._open: Exchanged | None = None

    def warm_up(self) -> None:
        """Compiles: a row of zeros to an expert worker in this thread.

        Raises:
            RuntimeError: Its answer was not taken, so none would be.
        """
        other = Exchange(self._hidden_size, self._dtype, 0, CallTimes(), _refuse)
        hidden_TH = torch.zeros(1, self._hidden_size, dtype=TORCH_DTYPES[self._dtype])
        routing = Routing.of(np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32), 1)
        with loopback() as stream:
            other.begin_step(CallId(0, 0, 0, 0, 0), LoopbackRoutes(stream, num_experts=1))
            # Without a deadline, since compiling takes as long as it takes.
            sent = other.send(Dispatch(0, 0, hidden_TH, routing, 1, math.inf))
            assert sent is not None, "nothing is in the way"
            stream.answer(self._hidden_size, self._dtype)
            sent.result()

    def begin_step(self, step_id: CallId, partners: Partners) -> None:
        """Pins where rows go.

        Args:
            step_id: With the parts of an identity that all calls of the step have.
            partners: The same object as long as nothing has changed.
        """
        self.hand_over()
        self._max_bytes = MAX_BYTES
        self._state[words.STATE_GATEWAY] = words.signed64(step_id.gateway)
        self._state[words.STATE_EPOCH] = words.signed64(step_id.epoch)
        self._state[words.STATE_STEP] = words.signed64(step_id.step)
        if partners is self._partners:
            self._open_links()
            return
        self._partners, self._streams = partners, partners.streams
        self._tables = {layer: (*table,) for layer, table in partners.tables.items()}
        self._routes = {}
        self._connections = [None] * len(self._streams)
        self._links_W = np.array([stream.link.address for stream in self._streams], np.int64)
        self._calls_WC = np.zeros((len(self._streams), words.NUM_CALL_WORDS), np.int64)
        self._shape, self._workspace = (0, 0), None
        self._open_links()

    def rest(self) -> None:
        """Sends nothing more in this step."""
        self._shape, self._workspace, self._max_bytes = (0, 0), None, 0

    def send(self, dispatch: Dispatch) -> Exchanged | None:
        """Sends rows to all expert workers; None, and nothing is sent, unless all is as usual.

        A dispatch that is open then goes on elsewhere: there is one at a time.
        """
        layer, micro_batch, hidden_TH, routing, num_generated_rows, deadline_s = dispatch
        table = self._tables.get(layer)
        ids_TK = as_input(routing.topk_ids_TK, np.int32)
        if table is None or self._open is not None or not self._has_room(ids_TK.shape, hidden_TH):
            self.hand_over()
            return None
        if not hidden_TH.is_contiguous():
            hidden_TH = hidden_TH.contiguous()
            dispatch = dispatch._replace(hidden_TH=hidden_TH)
        self._state[words.STATE_LAYER], self._state[words.STATE_MICRO_BATCH] = layer, micro_batch
        arguments = (
            self._state, self._links_W, self._calls_WC, *table, ids_TK, num_generated_rows,
            hidden_TH.data_ptr(), deadline_s,
        )  # fmt: skip
        if not send(*arguments) and not (self._open_links() and send(*arguments)):
            return None
        self._open = Exchanged(self, dispatch)
        return self._open

    def words_for(self, hidden_TH: Tensor, top_k: int) -> ExchangeWords | None:
        """What compiled code for several layers needs, to send as `send` does; None if it cannot.

        Args:
            hidden_TH: The rows of each layer, contiguous.
            top_k: Experts of a row.
        """
        if self._open is not None or not self._has_room((len(hidden_TH), top_k), hidden_TH):
            return None
        self._open_links()
        return ExchangeWords(self._state, self._links_W, self._calls_WC)

    def routes(self, first: int, count: int) -> LayerRoutes:
        """Where rows of successive layers go, kept for the same partners."""
        key = first, count
        if key not in self._routes:
            self._routes[key] = _stacked([self._tables[first + at] for at in range(count)])
        return self._routes[key]

    def sent_elsewhere(self, dispatch: Dispatch) -> Exchanged:
        """A dispatch that compiled code for several layers has sent and could not receive."""
        sent = self._open = Exchanged(self, dispatch)
        self.hand_over()
        return sent

    def receive(self, sent: Exchanged) -> bool:
        """True if the result of the dispatch that is open is there; else it was handed over."""
        longest_us = receive(
            self._state, self._links_W, self._calls_WC, sent.weights_TK,
            sent.combined_TH.data_ptr(), self._like,
        )  # fmt: skip
        if longest_us == words.UNUSUAL:
            self.hand_over()
            return False
        self._open = None
        sent.busy_s = longest_us / 1e6
        return True

    def hand_over(self) -> None:
        """Makes a `RemoteCall` of the dispatch that is open, if one is."""
        if self._open is None:
            return
        sent, self._open = self._open, None
        progress = self._progress(len(sent.dispatch.hidden_TH), sent.dispatch.routing)
        self._shape, self._workspace = (0, 0), None
        sent.taken_over = self._take_over(sent.dispatch, progress)

    def _open_links(self) -> bool:
        """Lets compiled code use all expert workers that can be; true if there are more now."""
        is_more = False
        for index, stream in enumerate(self._streams):
            if self._connections[index] is None or not stream.link.is_open:
                self._connections[index] = stream.open_exchange()
                is_more = is_more or self._connections[index] is not None
        return is_more

    def _has_room(self, shape: tuple[int, ...], hidden_TH: Tensor) -> bool:
        """True if there is memory for a dispatch of [T, K] pairs of such rows, or is now."""
        num_rows, top_k = shape
        if hidden_TH.nbytes != num_rows * self._row_bytes or not num_rows:
            return False
        if num_rows <= self._shape[0] and top_k == self._shape[1]:
            return True
        num_workers, num_pairs = len(self._streams), num_rows * top_k
        row_size, worker_size = self._row_bytes + 4, words.FRAME_OVERHEAD + 4
        frames_size = num_rows * min(top_k, num_workers) * row_size
        frames_size += num_pairs * 4 + num_workers * worker_size
        if max(frames_size, num_pairs * self._row_bytes) > self._max_bytes:
            return False
        self._workspace = Workspace(
            row_ids=np.empty(num_pairs, np.int64),
            row_offsets=np.empty(num_pairs + num_workers, np.uint32),
            expert_ids=np.empty(num_pairs, np.uint32),
            slot_ids=np.empty(num_pairs, np.int64),
            frames=np.empty(frames_size, np.uint8),
            outputs_SH=empty_bits((num_pairs, self._hidden_size), self._dtype),
            broken_T=np.empty(num_rows, np.bool_),
        )
        self._workspace.write_addresses(self._state)
        self._shape = (num_rows, top_k)
        return True

    def _progress(self, num_rows: int, routing: Routing) -> Progress:
        """How far the open dispatch has come."""
        workspace = self._workspace
        assert workspace is not None, "it was sent"
        sent, busy_us = [], 0
        calls = self._calls_WC.tolist()
        for worker, (call, direct) in enumerate(zip(calls, self._connections, strict=True)):
            busy_us = max(busy_us, call[words.CALL_COMPUTE_US])
            if not call[words.CALL_IS_OPEN]:
                continue
            assert direct is not None, "the call went over it"
            left = Unfinished(direct, workspace.unsent(call), call[words.CALL_ERROR])
            sent_s, limit_s = (call[at] / 1e9 for at in (words.CALL_SENT_NS, words.CALL_LIMIT_NS))
            rows, size_class = workspace.rows_of(worker, call), call[words.CALL_SIZE]
            sent.append(SentRows(rows, sent_s, limit_s, size_class, left))
        num_slots = routing.topk_ids_TK.size
        return Progress(
            workspace.outputs_SH[:num_slots], workspace.broken_T[:num_rows], busy_us / 1e6, sent
        )


def _refuse(dispatch: Dispatch, progress: Progress) -> RemoteCall:
    raise RuntimeError("a message to an expert worker in this process was not answered in time")


def _stacked(routes: Sequence[Route]) -> LayerRoutes:
    """The routes of successive layers."""
    is_fixed_L, worker_of_expert_LE, copies_LER, penalty_LW = zip(*routes, strict=True)
    return LayerRoutes(
        np.array(is_fixed_L), np.stack(worker_of_expert_LE), np.stack(copies_LER), penalty_LW[0]
    )
