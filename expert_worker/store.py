"""The experts that are resident on this device, and nothing of the others.

Threads: calls take a lease on a layer, one thread loads, others retire and unload. Each layer's
experts are an immutable snapshot that is replaced whole, so that a call computes with what it
leased, and loading never blocks it: reading and packing happen outside the lock.

    absent -> resident -> retiring -> absent       (a retiring expert still answers)
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from expert_worker.expert_reader import ExpertReader
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import ExpertMeshError, SettingsError
from expertmesh.expert_plan import ExpertPlan, plan_experts
from expertmesh.formats.coded import CodeName
from expertmesh.formats.keep import Coding
from expertmesh.model_config import DtypeName, ModelConfig
from expertmesh.settings import ExpertDtype
from expertmesh_kernels.grouped_mlp import ExpertTable, ExpertWeights
from expertmesh_kernels.host import TORCH_DTYPES, find_device
from expertmesh_kernels.linear import packed_like

logger = logging.getLogger(__name__)

Publish = Callable[[int, ExpertTable], None]
"""Told of the experts of a layer; raises OSError if they can't be replaced now."""


class ExpertStoreError(ExpertMeshError):
    """An expert cannot be loaded or unloaded; the message says why."""


@dataclass
class _Snapshot:
    """Experts of one layer at one time. Only `num_leases` changes, under the store's lock."""

    layer: int
    weights: ExpertTable = field(default_factory=lambda: ExpertTable({}))
    retiring: frozenset[int] = frozenset()
    num_leases: int = 0


@dataclass(frozen=True)
class LayerResidency:
    """Experts of one layer, ascending."""

    resident: tuple[int, ...]
    """May be used."""
    retiring: tuple[int, ...]
    """Still answer, but are to be used no more."""
    fingerprints: tuple[int, ...]
    """Of the resident ones: of the bytes that they were read from."""


class ExpertStore:
    """Resident experts by (layer, expert).

    Args:
        checkpoint: Where experts are read from.
        dtype: Type of the weights in memory.
        device: Where they are held, as torch names it.
        expert_dtype: How weights are held; see `settings.ModelOptions`.
        num_slots: Most experts at a time, all layers together; None for all of the model.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: DtypeName,
        device: str = "cpu",
        *,
        expert_dtype: ExpertDtype = "auto",
        num_slots: int | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.dtype: DtypeName = dtype
        self.device = find_device(device)
        self.num_slots = count_experts(self.config) if num_slots is None else num_slots
        self.plan = plan_experts(checkpoint, expert_dtype, dtype)
        self._codings = self._kept_codings()
        self._reader = ExpertReader(checkpoint, self.plan, self._codings, dtype, self.device)
        # Of all that was ever loaded; an expert's is there before the expert is.
        self._fingerprints: dict[tuple[int, int], int] = {}
        itemsize = TORCH_DTYPES[dtype].itemsize
        plan = self.plan if self._codings else ExpertPlan(dtype)
        self.bytes_per_expert = plan.expert_nbytes(self.config, itemsize)
        """Of one expert's weights (the largest's, if layers differ), as if not packed."""
        self.on_change: Callable[[], None] = _ignore_change
        """Called after every change of residency, in the thread that made it."""
        self.on_packed: Callable[[int, int, ExpertWeights], None] = _ignore_packed
        """Told of a layer's expert in the thread that has just packed it, before others see it."""
        self._publish_to: list[Publish] = []
        self._lock = threading.Lock()
        self._lease_ended = threading.Condition(self._lock)
        self._layers = {layer: _Snapshot(layer) for layer in self.config.moe_layers}
        self._leased_before: list[_Snapshot] = []  # replaced while calls were using them
        self._num_reserved = 0  # slots of experts that are being read

    def _kept_codings(self) -> dict[int, Coding]:
        """Layers whose experts are held quantised here; CUDA kernels do not take them yet."""
        plan, layers = self.plan, self.config.moe_layers
        found = {layer: plan.coding(layer) for layer in layers}
        codings = {layer: coding for layer, coding in found.items() if coding is not None}
        if codings and self.device.type != "cpu":
            if plan.on_load is not None:
                raise SettingsError(
                    f"expert_dtype is {plan.on_load.kind}, which no kernel for {self.device} takes",
                    fix="use --expert-dtype auto, or --device cpu",
                )
            logger.info("experts stored as %s are expanded to %s", plan.name, self.dtype)
            return {}
        if plan.expanded:
            formats = ", ".join(plan.expanded)
            logger.info(
                "experts of %d layers, stored as %s, are expanded to %s: no kernel takes them as "
                "they are", len(layers) - len(codings), formats, self.dtype,
            )  # fmt: skip
        return codings

    @property
    def config(self) -> ModelConfig:
        """The model."""
        return self.checkpoint.config

    @property
    def code_names(self) -> tuple[CodeName | None, ...]:
        """Kinds of codes of the experts held here; None for plain ones."""
        layers = self.config.moe_layers
        held = {self._codings[layer].kind if layer in self._codings else None for layer in layers}
        return tuple(sorted(held, key=str))

    def first_layers(self) -> tuple[int, ...]:
        """The first MoE layer of each kind: layers of a kind use the same kernels."""
        first: dict[object, int] = {}
        for layer in self.config.moe_layers:
            ffn = self.config.moe_ffn(layer)
            first.setdefault((self._codings.get(layer), ffn.activation, ffn.bias), layer)
        return tuple(first.values())

    def limit_slots(self, num_slots: int) -> None:
        """Holds no more experts than this from now on; those that it holds stay.

        Args:
            num_slots: Most experts at a time; all of the model are enough.
        """
        self.num_slots = min(num_slots, count_experts(self.config))

    def packed_likes(self) -> dict[int, npt.NDArray[np.generic]]:
        """MoE layer to how its experts are packed on the CPU; see `packed_like`."""
        kinds = {layer: self._codings.get(layer) for layer in self.config.moe_layers}
        dtype = TORCH_DTYPES[self.dtype]
        return {
            layer: packed_like(coding.kind if coding else None, dtype)
            for layer, coding in kinds.items()
        }

    def publish_to(self, publish: Publish) -> None:
        """Tells of the experts of each layer now, and of others before these are freed."""
        with self._lock:
            for layer, snapshot in self._layers.items():
                publish(layer, snapshot.weights)
            self._publish_to.append(publish)

    @property
    def num_used_slots(self) -> int:
        """Experts in memory, retiring ones included."""
        return sum(len(snapshot.weights) for snapshot in self._layers.values())

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights in memory."""
        layers = [snapshot.weights.values() for snapshot in list(self._layers.values())]
        return sum(weights.nbytes for experts in layers for weights in experts)

    def residency(self) -> dict[int, LayerResidency]:
        """MoE layer to its experts; a layer without any is left out."""
        found = {}
        for layer, snapshot in list(self._layers.items()):
            if snapshot.weights:
                retiring = tuple(sorted(snapshot.retiring))
                resident = tuple(sorted(snapshot.weights.keys() - snapshot.retiring))
                fingerprints = tuple(self._fingerprints[layer, expert] for expert in resident)
                found[layer] = LayerResidency(resident, retiring, fingerprints)
        return found

    def lease(self, layer: int) -> Lease:
        """A context in which the layer's experts, retiring ones included, stay in memory."""
        return Lease(self, layer)

    def _begin_lease(self, layer: int) -> _Snapshot:
        with self._lock:
            snapshot = self._layers[layer]
            snapshot.num_leases += 1
            return snapshot

    def _end_lease(self, snapshot: _Snapshot) -> None:
        with self._lock:
            snapshot.num_leases -= 1
            if not snapshot.num_leases:
                self._lease_ended.notify_all()

    def load(self, layer: int, expert: int) -> None:
        """Makes an expert resident; one that is retiring comes back. May take seconds.

        Raises:
            ExpertStoreError: No such expert, or no free slot.
            CheckpointError: It cannot be read.
        """
        self._check_exists(layer, expert)
        with self._lock:
            snapshot = self._layers[layer]
            if expert in snapshot.weights:
                self._replace(layer, snapshot.weights, snapshot.retiring - {expert})
            else:
                self._reserve_slot(layer, expert)
        if expert not in snapshot.weights:
            self._read_into_slot(layer, expert)
        self.on_change()

    def retire(self, layer: int, expert: int) -> bool:
        """Marks an expert as not to be used; False if it is not resident."""
        self._check_exists(layer, expert)
        with self._lock:
            snapshot = self._layers[layer]
            if expert not in snapshot.weights:
                return False
            self._replace(layer, snapshot.weights, snapshot.retiring | {expert})
        self.on_change()
        return True

    def unload(self, layer: int, expert: int, timeout_s: float) -> None:
        """Frees a retiring expert; returns when no call uses it any more.

        Raises:
            ExpertStoreError: It was loaded again, or calls still use it after the timeout.
        """
        with self._lock:
            snapshot = self._layers[layer]
            if expert in snapshot.weights and expert not in snapshot.retiring:
                raise ExpertStoreError(f"layer {layer} expert {expert} was loaded again")
            self._drop(snapshot, expert)
        self.on_change()
        self._wait_unused(layer, expert, time.monotonic() + timeout_s)

    def discard(self, layer: int, expert: int, weights: ExpertWeights) -> bool:
        """Takes an expert out at once, as it must not be used; calls that use it end with it.

        Returns:
            False if these weights are not those that are resident any more.

        Raises:
            TimeoutError: A computation does not end.
        """
        with self._lock:
            snapshot = self._layers[layer]
            if snapshot.weights.get(expert) is not weights:
                return False
            self._drop(snapshot, expert)
        self.on_change()
        return True

    def _drop(self, snapshot: _Snapshot, expert: int) -> None:
        """The lock is held."""
        left = {key: value for key, value in snapshot.weights.items() if key != expert}
        self._replace(snapshot.layer, ExpertTable(left), snapshot.retiring - {expert})

    def _wait_unused(self, layer: int, expert: int, deadline_s: float) -> None:
        with self._lock:
            while self._is_leased(layer, expert):
                if not self._lease_ended.wait(deadline_s - time.monotonic()):
                    raise ExpertStoreError(f"calls still use layer {layer} expert {expert}")

    def _is_leased(self, layer: int, expert: int) -> bool:
        self._leased_before = [old for old in self._leased_before if old.num_leases]
        return any(old.layer == layer and expert in old.weights for old in self._leased_before)

    def _check_exists(self, layer: int, expert: int) -> None:
        if layer not in self._layers:
            raise ExpertStoreError(f"layer {layer} has no experts")
        num_experts = self.config.moe_ffn(layer).num_experts
        if not 0 <= expert < num_experts:
            raise ExpertStoreError(
                f"layer {layer} has experts 0 to {num_experts - 1}, not {expert}"
            )

    def _reserve_slot(self, layer: int, expert: int) -> None:
        if self.num_used_slots + self._num_reserved >= self.num_slots:
            raise ExpertStoreError(
                f"no free slot for layer {layer} expert {expert}: all {self.num_slots} are in use"
            )
        self._num_reserved += 1

    def _read_into_slot(self, layer: int, expert: int) -> None:
        try:
            loaded = self._reader.read(layer, expert)
        except BaseException:
            with self._lock:
                self._num_reserved -= 1
            raise
        self.on_packed(layer, expert, loaded.weights)
        with self._lock:
            self._num_reserved -= 1
            self._fingerprints[layer, expert] = loaded.fingerprint
            snapshot = self._layers[layer]
            experts = ExpertTable({**snapshot.weights, expert: loaded.weights})
            self._replace(layer, experts, snapshot.retiring - {expert})

    def _replace(self, layer: int, weights: ExpertTable, retiring: frozenset[int]) -> None:
        """Swaps the snapshot of a layer. The lock is held."""
        old = self._layers[layer]
        if weights is not old.weights:
            for publish in self._publish_to:
                publish(layer, weights)
        self._leased_before = [kept for kept in self._leased_before if kept.num_leases]
        if old.num_leases:
            self._leased_before.append(old)
        self._layers[layer] = _Snapshot(layer, weights, retiring)


class Lease:
    """The use of a layer's experts. A class, as a generator would cost every call more."""

    __slots__ = ("_layer", "_snapshot", "_store")

    def __init__(self, store: ExpertStore, layer: int) -> None:
        self._store = store
        self._layer = layer

    def __enter__(self) -> ExpertTable:
        """The experts."""
        self._snapshot = self._store._begin_lease(self._layer)
        return self._snapshot.weights

    def __exit__(self, *_: object) -> None:
        """They are used no more."""
        self._store._end_lease(self._snapshot)


def count_experts(config: ModelConfig) -> int:
    """Experts of the model, all layers together."""
    return sum(config.moe_ffn(layer).num_experts for layer in config.moe_layers)


def _ignore_change() -> None:
    """The listener that is there by default."""


def _ignore_packed(layer: int, expert: int, weights: ExpertWeights) -> None:
    """The listener that is there by default."""
