"""Orders to expert workers, as a leader gives them; for meshes whose gateways do not lead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import grpc

from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.v1 import expert_service_pb2_grpc as rpc
from tests.chaos.harness.mesh import Mesh
from tests.chaos.harness.pool import PoolWorker
from tests.support.processes import poll
from tests.support.tiny_checkpoints import TinyShape

Pairs = frozenset[tuple[int, int]]
"""(layer, expert)."""
_TIMEOUT_S = 60.0
_TOKEN = 1  # of the first leader, so that one may come after us


def all_pairs(shape: TinyShape) -> Pairs:
    """Every expert of a model."""
    return frozenset(
        (layer, expert) for layer in range(shape.num_layers) for expert in range(shape.num_experts)
    )


def resident(worker: PoolWorker) -> Pairs:
    """What a worker holds and does not give up."""
    return frozenset(
        (held.layer, expert) for held in worker.state().layers for expert in held.resident
    )


def load(worker: PoolWorker, pairs: Iterable[tuple[int, int]]) -> None:
    """Has experts loaded; fails unless they all are."""
    request = pb.LoadExpertsRequest(
        incarnation=worker.state().incarnation, leader_token=_TOKEN, experts=_ids(pairs)
    )
    with grpc.insecure_channel(worker.address) as channel:
        replies = list(rpc.ExpertServiceStub(channel).LoadExperts(request, timeout=_TIMEOUT_S))
    assert all(reply.state != pb.EXPERT_STATE_FAILED for reply in replies), replies


def unload(worker: PoolWorker, pairs: Iterable[tuple[int, int]]) -> None:
    """Has experts retired and freed; fails unless they all are."""
    request = pb.UnloadExpertsRequest(
        incarnation=worker.state().incarnation, leader_token=_TOKEN, experts=_ids(pairs)
    )
    with grpc.insecure_channel(worker.address) as channel:
        replies = list(rpc.ExpertServiceStub(channel).UnloadExperts(request, timeout=_TIMEOUT_S))
    assert all(reply.state != pb.EXPERT_STATE_FAILED for reply in replies), replies


def place(mesh: Mesh, placement: Sequence[Pairs]) -> None:
    """Has all experts where they are to be, and waits until the gateway knows; never fewer copies
    of an expert than the lesser number of before and after.
    """
    held = [resident(worker) for worker in mesh.workers]
    for worker, wanted, has in zip(mesh.workers, placement, held, strict=True):
        load(worker, wanted - has)
    for worker, wanted, has in zip(mesh.workers, placement, held, strict=True):
        unload(worker, has - wanted)
    _wait_known(mesh, placement)


def _wait_known(mesh: Mesh, placement: Sequence[Pairs]) -> None:
    by_address = {
        worker.address: len(pairs) for worker, pairs in zip(mesh.workers, placement, strict=True)
    }

    def is_known() -> bool:
        workers = mesh.api.ready().json["workers"]
        return {worker["address"]: worker["num_experts"] for worker in workers} == by_address

    poll(is_known, timeout_s=30.0, what="the gateway knows the placement")


def _ids(pairs: Iterable[tuple[int, int]]) -> list[pb.ExpertId]:
    return [pb.ExpertId(layer=layer, expert=expert) for layer, expert in sorted(pairs)]
