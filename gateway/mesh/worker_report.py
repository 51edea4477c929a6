"""Reads an expert worker's snapshot: can it be used, and for which experts?"""

from __future__ import annotations

from dataclasses import dataclass

from expertmesh import PROTOCOL_REVISION
from expertmesh.model_config import DtypeName, ModelConfig
from expertmesh.placement import ExpertWorkerEntry
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import DTYPE_CODES
from gateway.mesh.mesh_status import ExpertWorkerState, ExpertWorkerStatus


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


def read_snapshot(
    snapshot: pb.WatchResponse, address: str, served: ServedIdentity, config: ModelConfig
) -> tuple[ExpertWorkerStatus, ExpertWorkerEntry | None]:
    """Status of an expert worker, and its entry of the expert map if it can be used.

    Args:
        snapshot: What it says.
        address: host:port where it says so.
        served: What it must serve.
        config: Which experts there are.
    """
    worker_id = snapshot.worker_id
    resident = {layer.layer: tuple(sorted(layer.resident)) for layer in snapshot.layers}
    num_experts = sum(len(experts) for experts in resident.values())
    state, message = ExpertWorkerState.READY, ""
    if problem := _incompatibility(snapshot, served) or _unknown_expert(resident, config):
        state, message = ExpertWorkerState.INCOMPATIBLE, problem
    elif snapshot.draining:
        state, message = ExpertWorkerState.DRAINING, "it takes no new work"
    status = ExpertWorkerStatus(worker_id, address, state, message, num_experts)
    if state is not ExpertWorkerState.READY:
        return status, None
    entry = ExpertWorkerEntry(
        worker_id, address, snapshot.incarnation, resident, snapshot.row_credits
    )
    return status, entry


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
