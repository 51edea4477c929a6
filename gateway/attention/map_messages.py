"""Expert maps as messages of the AttentionService."""

from __future__ import annotations

from expertmesh.placement import ExpertMap, ExpertWorkerEntry
from expertmesh.v1 import attention_service_pb2 as pb
from expertmesh.v1 import expert_service_pb2 as expert_pb


def map_message(expert_map: ExpertMap, gateway: int) -> pb.MembershipRequest:
    """A whole expert map for an attention worker.

    Args:
        expert_map: The map.
        gateway: Incarnation of this gateway.
    """
    workers = [_worker(entry) for entry in expert_map.workers]
    update = pb.ExpertMapUpdate(epoch=expert_map.epoch, gateway=gateway, workers=workers)
    return pb.MembershipRequest(expert_map=update)


def _worker(entry: ExpertWorkerEntry) -> pb.ExpertMapWorker:
    layers = [
        expert_pb.LayerExperts(layer=layer, resident=experts)
        for layer, experts in entry.resident.items()
    ]
    return pb.ExpertMapWorker(
        worker_id=entry.worker_id,
        address=entry.address,
        incarnation=entry.incarnation,
        layers=layers,
        row_credits=entry.row_credits,
        leaving=entry.leaving,
    )
