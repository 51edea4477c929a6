"""The Membership stream: expert maps in, observations of expert workers out.

Apart from the Run stream, so that a new map reaches a step that is waiting for experts. Threads:
the stream's handler yields observations; `membership-reader`, owned by the handler and ended with
the stream, takes the maps.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import grpc

from attention_worker.gate_counts import GateCounts
from expertmesh.model_config import ModelConfig
from expertmesh.placement import ExpertMap, ExpertWorkerEntry
from expertmesh.v1 import attention_service_pb2 as pb

logger = logging.getLogger(__name__)

OBSERVATION_INTERVAL_S = 0.5


class MapUser(Protocol):
    """What follows the expert map: the client of the expert workers."""

    def update_map(self, expert_map: ExpertMap, gateway: int = 0) -> None:
        """Uses this map from the next step on. `gateway` is the incarnation of its maker."""
        ...

    def observations(self) -> Sequence[pb.ExpertObservation]:
        """News of expert workers since the last call; may be empty."""
        ...

    def take_dropped(self) -> int:
        """(row, expert) pairs left out since the last call, as nobody had the expert."""
        ...


class NoMapUser:
    """The colocated mode: maps are taken and not used."""

    def update_map(self, expert_map: ExpertMap, gateway: int = 0) -> None:
        """Nothing to route."""

    def observations(self) -> Sequence[pb.ExpertObservation]:
        """Nothing to observe."""
        return ()

    def take_dropped(self) -> int:
        """Nothing is left out."""
        return 0


class MembershipStream:
    """One life of the stream: folds maps, collects observations.

    Args:
        config: Layers and experts that a map may name.
        user: Where maps go and observations come from.
        gate_counts: How often experts were chosen.
    """

    def __init__(self, config: ModelConfig, user: MapUser, gate_counts: GateCounts) -> None:
        self._config = config
        self._user = user
        self._gate_counts = gate_counts
        self._epoch = 0
        self._refused = ""
        self._ended = threading.Event()

    def end(self) -> None:
        """Ends the stream, from any thread."""
        self._ended.set()

    def serve(
        self, requests: Iterator[pb.MembershipRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.MembershipResponse]:
        """The handler: yields observations when there are any, until the peer or `end` ends it."""
        if not context.add_callback(self.end):
            return
        reader = threading.Thread(
            target=self._read, args=(requests,), name="membership-reader", daemon=True
        )
        reader.start()
        while not self._ended.wait(OBSERVATION_INTERVAL_S):
            news = pb.MembershipResponse(
                observations=self._user.observations(),
                num_dropped_pairs=self._user.take_dropped(),
                gate_rows=self._gate_counts.take(),
            )
            if news.ByteSize():
                news.epoch = self._epoch
                yield news
        if self._refused:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, self._refused)

    def _read(self, requests: Iterator[pb.MembershipRequest]) -> None:
        try:
            for request in requests:
                self._take(request.expert_map)
        except grpc.RpcError as error:
            logger.info("the membership stream ended%s", f": {error}" if str(error) else "")
        except ValueError as error:
            logger.error("refused an expert map: %s", error)
            self._refused = str(error)
        finally:
            self.end()

    def _take(self, update: pb.ExpertMapUpdate) -> None:
        """Hands a map on; one that is older than the last is dropped."""
        if update.epoch < self._epoch:
            logger.warning("dropped expert map %d, have %d", update.epoch, self._epoch)
            return
        self._user.update_map(expert_map_from_proto(update, self._config), update.gateway)
        self._epoch = update.epoch


def expert_map_from_proto(update: pb.ExpertMapUpdate, config: ModelConfig) -> ExpertMap:
    """The map of an update.

    Raises:
        ValueError: It names a layer or an expert that the model does not have.
    """
    for worker in update.workers:
        for layer in worker.layers:
            if layer.layer not in config.moe_layers:
                raise ValueError(f"{worker.worker_id}: layer {layer.layer} has no experts")
            if layer.resident and max(layer.resident) >= config.num_experts:
                raise ValueError(
                    f"{worker.worker_id}: layer {layer.layer} expert {max(layer.resident)}, "
                    f"expected below {config.num_experts}"
                )
    entries = tuple(_entry(worker) for worker in update.workers)
    return ExpertMap(update.epoch, config.moe_layers, config.num_experts, entries)


def _entry(worker: pb.ExpertMapWorker) -> ExpertWorkerEntry:
    return ExpertWorkerEntry(
        worker_id=worker.worker_id,
        address=worker.address,
        incarnation=worker.incarnation,
        resident={layer.layer: tuple(sorted(layer.resident)) for layer in worker.layers},
        row_credits=worker.row_credits,
        leaving=worker.leaving,
    )
