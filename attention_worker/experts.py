"""Where routed rows go: experts in this process, or expert workers over gRPC.

The forward pass knows `ExpertClient` and `Pending` only. T tokens, K top-k, H hidden size.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attention_worker.calls import Batch, Progress
from attention_worker.dropped_experts import DroppedExperts
from attention_worker.exchange import Dispatch, Exchange, NoExchange
from attention_worker.expert_routes import Routes, warm_up_choice
from attention_worker.expert_stream import DEFAULT_ROW_CREDITS, ExpertStream
from attention_worker.forward_rpc import ForwardEndpoint
from attention_worker.probes import Prober
from attention_worker.remote_call import Common, RemoteCall
from expert_worker.store import ExpertStore
from expertmesh.model_config import Activation, DtypeName, ModelConfig
from expertmesh.placement import ExpertMap, ExpertWorkerEntry
from expertmesh.transport import Plaintext, Transport
from expertmesh.v1 import attention_service_pb2 as attention_pb
from expertmesh.wire import WireDtype, fingerprint64, incarnation, max_message_bytes
from expertmesh.wire_encode import CallId
from expertmesh_kernels.grouped_mlp import ExpertTable, combined_mlp
from expertmesh_kernels.router import Routing

_CLOSE_TIMEOUT_S = 1.0
_LONGEST_CALL_S = 3600.0


class Pending(Protocol):
    """Rows on their way to experts and back."""

    @property
    def busy_s(self) -> float:
        """Once the result is there: time that the slowest expert worker computed."""

    def result(self) -> Tensor:
        """[T, H] the weighted sums over each row's experts, in the dtype of the rows. Once.

        Raises:
            ExpertUnavailableError: Experts did not answer before the deadline of the dispatch.
            LethalRowsError: Too many expert workers were lost with the same rows.
        """
        ...


class ExpertClient(Protocol):
    """Sends routed rows to experts. One thread, that of the forward pass."""

    def begin_step(self, step: int, *, cautious: bool = False) -> None:
        """Pins the current expert map for the whole step.

        Args:
            step: Its number.
            cautious: Its rows are suspected of taking expert workers down.
        """
        ...

    @property
    def degraded_rows(self) -> Sequence[tuple[int, npt.NDArray[np.int64]]]:
        """Micro-batch and rows that went without an expert in this step."""
        ...

    def dispatch(
        self,
        layer: int,
        h_TH: Tensor,
        routing: Routing,
        num_generated_rows: int,
        deadline_s: float,
    ) -> Pending:
        """Sends rows to their experts and returns at once.

        Args:
            layer: An MoE layer.
            h_TH: Hidden states; not changed before the result is there.
            routing: Experts and weights of each row.
            num_generated_rows: Leading rows that belong to generated tokens.
            deadline_s: For the result, on the monotonic clock.

        Raises:
            ExpertUnavailableError: A routed expert has no usable copy.
            LethalRowsError: See `Pending`; of cautious steps.
        """
        ...


@dataclass(frozen=True)
class Finished:
    """A result that is there already."""

    combined_TH: Tensor
    busy_s: float = 0.0

    def result(self) -> Tensor:
        """The combined rows."""
        return self.combined_TH


class LocalExperts:
    """Experts in this process: the colocated mode, and what the remote one must equal bit by bit.

    Args:
        store: Holds all experts.
    """

    def __init__(self, store: ExpertStore) -> None:
        self._store = store
        config = store.config
        self._activations = {layer: config.moe_ffn(layer).activation for layer in config.moe_layers}

    def begin_step(self, step: int, *, cautious: bool = False) -> None:
        """Nothing to pin: the experts are here."""

    @property
    def degraded_rows(self) -> Sequence[tuple[int, npt.NDArray[np.int64]]]:
        """None: all experts are here."""
        return ()

    def dispatch(
        self,
        layer: int,
        h_TH: Tensor,
        routing: Routing,
        num_generated_rows: int,
        deadline_s: float,
    ) -> Pending:
        """Computes at once; see ExpertClient."""
        with self._store.lease(layer) as experts:
            return Finished(combined_mlp(h_TH, routing, experts, self._activations[layer]))

    def resident(self, layer: int) -> tuple[ExpertTable, Activation]:
        """The experts of a layer for good, since none is ever unloaded here."""
        with self._store.lease(layer) as experts:
            return experts, self._activations[layer]

    def close(self) -> None:
        """Nothing to end."""


class RemoteExperts:
    """Experts on expert workers, one stream each.

    Threads: the forward pass calls `begin_step` and `dispatch`; another thread calls `update_map`
    and `observations`.

    Args:
        config: The model.
        model_fingerprint: Of its checkpoint; expert workers of another refuse.
        dtype: Of hidden states and outputs.
        wire_dtype: How hidden states travel; by default as they are.
        device: Where hidden states are.
        allow_degraded: Whether experts without any copy are left out.
        transport: Connects to expert workers; plain text by default.
    """

    def __init__(
        self,
        config: ModelConfig,
        model_fingerprint: bytes,
        dtype: DtypeName,
        wire_dtype: WireDtype | None = None,
        device: str = "cpu",
        *,
        allow_degraded: bool = False,
        transport: Transport | None = None,
    ) -> None:
        self._transport = transport or Plaintext()
        self._config = config
        self._fingerprint = fingerprint64(model_fingerprint)
        self._dtype: DtypeName = dtype
        self._wire_dtype: WireDtype = wire_dtype or dtype
        self._own_id = incarnation()  # stands in for the gateway's until a map names that
        self._lock = threading.Lock()
        self._common = Common(dropped=DroppedExperts(allow_degraded))
        self._routes = Routes(ExpertMap.empty(config))
        self._pinned = self._routes
        self._retired: list[ExpertStream] = []
        self._unreported: list[ExpertStream] = []  # closed since the last observations
        self._closed = False
        self._exchange: Exchange | NoExchange = NoExchange()
        if torch.device(device).type == "cpu" and self._wire_dtype == dtype:
            self._exchange = Exchange(
                config.hidden_size, dtype, self._fingerprint, self._common.times, self._take_over
            )
        self._prober = Prober(config.hidden_size, self._wire_dtype, self._fingerprint)
        self._step_id = CallId(self._own_id, epoch=0, step=0, layer=0, micro_batch=0)
        self._cautious = False
        self._num_dispatched: dict[int, int] = {}  # micro-batches of the step, by layer

    def warm_up(self) -> None:
        """Compiles what dispatches need beside the kernels of `warm_up.py`."""
        self._exchange.warm_up()
        warm_up_choice(self._config)

    # --- the forward pass ---

    def begin_step(self, step: int, *, cautious: bool = False) -> None:
        """Pins the current expert map; see ExpertClient."""
        self._exchange.hand_over()
        for call in list(self._common.unfinished):  # of a step that failed
            call.drop()
        self._num_dispatched.clear()
        self._common.dropped.begin_step()
        with self._lock:
            self._pinned = self._routes
            self._close_unpinned()
        routes = self._pinned
        self._step_id = self._step_id._replace(
            gateway=routes.gateway or self._own_id, epoch=routes.expert_map.epoch, step=step
        )
        self._prober.look(self._step_id, routes)
        self._exchange.begin_step(self._step_id, routes)
        self._cautious = cautious
        if cautious:
            self._exchange.rest()

    def dispatch(
        self,
        layer: int,
        h_TH: Tensor,
        routing: Routing,
        num_generated_rows: int,
        deadline_s: float,
    ) -> Pending:
        """One message to each expert worker with rows; see ExpertClient."""
        micro_batch = self._num_dispatched.get(layer, 0)
        self._num_dispatched[layer] = micro_batch + 1
        dispatch = Dispatch(layer, micro_batch, h_TH, routing, num_generated_rows, deadline_s)
        if self._common.unfinished:  # it may send and receive again, and nothing may get in between
            self._exchange.hand_over()
        elif (sent := self._exchange.send(dispatch)) is not None:
            return sent
        call = self._remote_call(dispatch)
        call.start()
        return call

    @property
    def degraded_rows(self) -> Sequence[tuple[int, npt.NDArray[np.int64]]]:
        """See ExpertClient."""
        return self._common.dropped.rows

    @property
    def exchange(self) -> Exchange | None:
        """What sends and receives in compiled code; None if nothing may."""
        return self._exchange if isinstance(self._exchange, Exchange) else None

    def _take_over(self, dispatch: Dispatch, progress: Progress) -> RemoteCall:
        call = self._remote_call(dispatch)
        call.resume(progress)
        return call

    def _remote_call(self, dispatch: Dispatch) -> RemoteCall:
        layer, micro_batch = dispatch.layer, dispatch.micro_batch
        batch = Batch(
            call_id=self._step_id._replace(layer=layer, micro_batch=micro_batch),
            hidden_TH=dispatch.hidden_TH,
            routing=dispatch.routing,
            num_generated_rows=dispatch.num_generated_rows,
            dtype=self._dtype,
            wire_dtype=self._wire_dtype,
            model_fingerprint=self._fingerprint,
            deadline_s=min(dispatch.deadline_s, time.monotonic() + _LONGEST_CALL_S),
            cautious=self._cautious,
        )
        return RemoteCall(batch, self._pinned, self._common)

    # --- other threads ---

    def update_map(self, expert_map: ExpertMap, gateway: int = 0) -> None:
        """Follows a new map: opens streams to new expert workers at once, retires others.

        Args:
            expert_map: Takes effect with the next step.
            gateway: Incarnation of the gateway whose map it is.
        """
        expert_map.prepare()
        self._common.dropped.forget()
        with self._lock:
            if self._closed:
                return
            known = {_life(stream.worker): stream for stream in self._routes.streams}
            streams = tuple(
                known.get(_life(worker)) or self._open(worker) for worker in expert_map.workers
            )
            retired = [stream for stream in known.values() if stream not in streams]
            for stream in retired:
                stream.retire()
            self._retired += retired
            self._routes = Routes(expert_map, streams, gateway)
            self._close_unpinned()

    def observations(self) -> Sequence[attention_pb.ExpertObservation]:
        """What was seen of each expert worker since the last time; none without news."""
        with self._lock:
            streams = [*self._routes.streams, *self._retired, *self._unreported]
            self._unreported = []
        return [seen for stream in streams if (seen := stream.observe()) is not None]

    def take_dropped(self) -> int:
        """See MapUser."""
        return self._common.dropped.take()

    @property
    def num_late_replies(self) -> int:
        """Replies of the current streams that came too late or twice."""
        return sum(stream.observed.num_late_replies for stream in self._routes.streams)

    def close(self) -> None:
        """Ends all streams and their threads within a second; what is on its way fails."""
        with self._lock:
            self._closed = True
            streams = [*self._routes.streams, *self._retired]
            self._retired = []
        for stream in streams:
            stream.close()
        deadline_s = time.monotonic() + _CLOSE_TIMEOUT_S
        for stream in streams:
            stream.join(max(0.0, deadline_s - time.monotonic()))

    def _open(self, worker: ExpertWorkerEntry) -> ExpertStream:
        credits = worker.row_credits or DEFAULT_ROW_CREDITS
        num_bytes = max_message_bytes(self._config, self._dtype, credits)
        endpoint = ForwardEndpoint(self._transport, worker.address, num_bytes)
        return ExpertStream(endpoint, worker, self._common.times)

    def _close_unpinned(self) -> None:
        """Closes retired streams that the running step cannot use. The lock is held."""
        kept = [stream for stream in self._retired if stream in self._pinned.streams]
        for stream in self._retired:
            if stream not in kept:
                stream.close()
                self._unreported.append(stream)
        self._retired = kept


def _life(worker: ExpertWorkerEntry) -> tuple[str, str, int]:
    """What makes a stream to an expert worker another one."""
    return worker.worker_id, worker.address, worker.incarnation
