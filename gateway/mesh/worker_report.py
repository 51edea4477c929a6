"""Reads an expert worker's snapshot: can it be used, and for which experts?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from expertmesh import PROTOCOL_REVISION
from expertmesh.call_waits import WAIT_BOUNDS_S
from expertmesh.model_config import DtypeName, ModelConfig
from expertmesh.placement import ExpertWorkerEntry
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import DTYPE_CODES
from gateway.mesh.discovery import Endpoint
from gateway.mesh.mesh_status import ExpertWorkerState, ExpertWorkerStatus
from gateway.placement.state import ExpertKey, WorkerView

_LEAVES = "it leaves, and is used for sole copies only"
_NO_WAITS = (0,) * (len(WAIT_BOUNDS_S) + 1)


@dataclass(frozen=True)
class ServedIdentity:
    """What the gateway serves, and expert workers must too."""

    name: str
    fingerprint: bytes
    dtype: DtypeName
    """Of the hidden states on the wire."""
    expert_dtype: str = ""
    """How the weights of experts are held; empty: as `dtype`."""
    max_step_tokens: int = 1
    """Token rows of the largest step, all of which may go to one expert worker."""


@dataclass(frozen=True)
class WorkCounters:
    """What an expert worker has done in this life of it."""

    uptime_s: float = 0.0
    """Its age when this was counted."""
    busy_s: float = 0.0
    """Of that, its device computed."""
    calls_by_wait: tuple[int, ...] = _NO_WAITS
    """Calls by the time that they waited for the device: see `expertmesh.call_waits`."""
    cpu_s: float = 0.0
    """Processor time of its process; 0 if it does not tell."""
    rss_bytes: int = 0
    """Memory of its process; 0 if it does not tell."""


@dataclass(frozen=True)
class KnownWorker:
    """An expert worker that answers and fits, for who places experts."""

    address: str
    """host:port of its ExpertService."""
    view: WorkerView
    pairs: Mapping[ExpertKey, int]
    """(row, expert) pairs computed in this life of it, by resident expert."""
    work: WorkCounters = WorkCounters()
    copies: Mapping[ExpertKey, int] = field(default_factory=dict)
    """Resident expert to the fingerprint of the bytes that it was read from; none if it is not
    told."""
    layer_pairs: Mapping[int, int] = field(default_factory=dict)
    """(row, expert) pairs computed in this life of it, by layer."""
    device: str = ""
    """E.g. "cpu" or "cuda:0"."""


@dataclass(frozen=True)
class WorkerReport:
    """What a snapshot says."""

    status: ExpertWorkerStatus
    entry: ExpertWorkerEntry | None = None
    """Of the expert map; None if it cannot be used."""
    known: KnownWorker | None = None
    """None likewise."""


def read_snapshot(
    snapshot: pb.WatchResponse, address: str, served: ServedIdentity, config: ModelConfig
) -> WorkerReport:
    """Status of an expert worker, and what it can be used for.

    Args:
        snapshot: What it says.
        address: host:port where it says so.
        served: What it must serve.
        config: Which experts there are.
    """
    worker_id = snapshot.worker_id
    resident = {layer.layer: tuple(sorted(layer.resident)) for layer in snapshot.layers}
    num_experts = sum(len(experts) for experts in resident.values())
    if problem := _incompatibility(snapshot, served) or _unknown_expert(resident, config):
        state = ExpertWorkerState.INCOMPATIBLE
        return WorkerReport(ExpertWorkerStatus(worker_id, address, state, problem, num_experts))
    state, message = ExpertWorkerState.READY, ""
    if snapshot.draining:
        state, message = ExpertWorkerState.DRAINING, _LEAVES
    return WorkerReport(
        ExpertWorkerStatus(worker_id, address, state, message, num_experts),
        ExpertWorkerEntry(
            worker_id,
            address,
            snapshot.incarnation,
            resident,
            snapshot.row_credits,
            leaving=snapshot.draining,
        ),
        KnownWorker(
            address,
            _view(snapshot),
            _pairs(snapshot),
            _work(snapshot.load),
            _copies(snapshot),
            layer_pairs={layer.layer: sum(layer.pairs) for layer in snapshot.layers},
            device=snapshot.device,
        ),
    )


def with_endpoint(report: WorkerReport, endpoint: Endpoint) -> WorkerReport:
    """A report with what discovery knows: that an expert worker leaves, before it says so itself,
    and on which machine it is."""
    entry, known, status = report.entry, report.known, report.status
    if entry is None or known is None or not (endpoint.leaving or endpoint.node):
        return report
    leaving = entry.leaving or endpoint.leaving
    if endpoint.leaving and status.state is ExpertWorkerState.READY:
        status = replace(status, state=ExpertWorkerState.DRAINING, message=_LEAVES)
    view = replace(known.view, leaving=leaving, node=endpoint.node or known.view.node)
    return WorkerReport(status, replace(entry, leaving=leaving), replace(known, view=view))


def _view(snapshot: pb.WatchResponse) -> WorkerView:
    return WorkerView(
        worker_id=snapshot.worker_id,
        incarnation=snapshot.incarnation,
        node=snapshot.node,
        num_slots=snapshot.capacity.expert_slots,
        resident=_keys((layer.layer, layer.resident) for layer in snapshot.layers),
        retiring=_keys((layer.layer, layer.retiring) for layer in snapshot.layers),
        leaving=snapshot.draining,
    )


def _keys(layers: Iterable[tuple[int, Iterable[int]]]) -> frozenset[ExpertKey]:
    return frozenset((layer, expert) for layer, experts in layers for expert in experts)


def _pairs(snapshot: pb.WatchResponse) -> Mapping[ExpertKey, int]:
    return {
        (layer.layer, expert): count
        for layer in snapshot.layers
        for expert, count in zip(layer.resident, layer.pairs, strict=False)
    }


def _copies(snapshot: pb.WatchResponse) -> Mapping[ExpertKey, int]:
    return {
        (layer.layer, expert): fingerprint
        for layer in snapshot.layers
        for expert, fingerprint in zip(layer.resident, layer.fingerprints, strict=False)
    }


def _work(load: pb.LoadCounters) -> WorkCounters:
    waits = tuple(load.calls_by_wait)
    if len(waits) != len(_NO_WAITS):
        return WorkCounters()  # as if it said nothing: other counts cannot be compared with these
    return WorkCounters(
        *(load.uptime_us / 1e6, load.compute_us / 1e6, waits, load.cpu_us / 1e6, load.rss_bytes)
    )


def _incompatibility(snapshot: pb.WatchResponse, served: ServedIdentity) -> str:
    """What differs, with both values; empty if nothing does."""
    if not snapshot.worker_id:
        return "it has no worker id, expected a stable name"
    if snapshot.protocol_revision != PROTOCOL_REVISION:
        return (
            f"it has protocol revision {snapshot.protocol_revision}, "
            f"this gateway {PROTOCOL_REVISION}"
        )
    model = snapshot.model
    if model.fingerprint != served.fingerprint:
        return (
            f"it serves model {model.name} ({model.fingerprint.hex()[:16]}), "
            f"this gateway {served.name} ({served.fingerprint.hex()[:16]})"
        )
    if model.dtype != DTYPE_CODES[served.dtype]:
        dtype = {code: name for name, code in DTYPE_CODES.items()}.get(model.dtype)
        return f"it has dtype {dtype or model.dtype}, this gateway {served.dtype}"
    theirs, ours = model.expert_dtype or served.dtype, served.expert_dtype or served.dtype
    if theirs != ours:
        return f"it has experts in {theirs}, this gateway in {ours} (--expert-dtype of both)"
    if 0 < snapshot.row_credits < served.max_step_tokens:
        return (
            f"it grants {snapshot.row_credits} row credits, fewer than the "
            f"{served.max_step_tokens} tokens of a step (its --row-credits, this gateway's "
            "--max-num-batched-tokens)"
        )
    return ""


def _unknown_expert(resident: dict[int, tuple[int, ...]], config: ModelConfig) -> str:
    """Names an expert that the model does not have; empty if there is none."""
    for layer, experts in resident.items():
        if experts and (layer not in config.moe_layers or experts[-1] >= config.num_experts):
            return f"it reports layer {layer} expert {experts[-1]}, which the model does not have"
    return ""
