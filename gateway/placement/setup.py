"""What places the experts of a gateway, by its settings."""

from __future__ import annotations

from functools import partial

from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import StartupError
from expertmesh.expert_plan import ExpertPlan
from expertmesh.leader_lock import LeaseLock
from expertmesh.safetensors_file import STORAGE
from expertmesh.settings import MeshOptions
from expertmesh.transport import Transport
from gateway.cluster.access import ClusterAccess
from gateway.cluster.api import ClusterApi
from gateway.placement.controller import PlacementController, Workers
from gateway.placement.election import Election, FileElection
from gateway.placement.lease_election import LeaseElection, LeaseTimes
from gateway.placement.lock_path import lock_path
from gateway.placement.operator import Operator, StaticPlacement
from gateway.placement.order_calls import OrderCalls
from gateway.placement.state import Experts, PlacementPolicy


def make_placement(
    mesh: MeshOptions,
    checkpoint: Checkpoint,
    expert_plan: ExpertPlan,
    workers: Workers,
    transport: Transport,
) -> Operator:
    """The placement; nothing runs yet. Not for a thread with a running event loop.

    Args:
        mesh: Where experts are, and who decides it.
        checkpoint: The model.
        expert_plan: How its experts are held.
        workers: Who knows the expert workers.
        transport: Connects to them.

    Raises:
        StartupError: The election cannot be taken part in.
    """
    config = checkpoint.config
    if mesh.colocated or not config.moe_layers or mesh.placement == "static":
        return StaticPlacement()
    nbytes = expert_plan.expert_nbytes(config, STORAGE[expert_plan.dtype].itemsize)
    return PlacementController(
        workers,
        Experts(config.moe_layers, config.num_experts, nbytes),
        PlacementPolicy(
            min_copies=mesh.min_copies, bytes_per_minute=mesh.move_mib_per_minute << 20
        ),
        make_election(mesh),
        partial(OrderCalls, transport),
    )


def make_election(mesh: MeshOptions) -> Election:
    """Who leads; nothing runs yet.

    Raises:
        StartupError: There is no access to Kubernetes, or no client for it.
    """
    lock = mesh.lock
    if isinstance(lock, LeaseLock):
        api = ClusterApi.open(ClusterAccess.of(mesh))
        return LeaseElection(api, lock.name, LeaseTimes.of(mesh.lease_duration_s))
    return FileElection(lock_path(lock, mesh.experts))


def start_placement(placement: Operator) -> None:
    """Starts it.

    Raises:
        StartupError: The lock file cannot be used.
    """
    try:
        placement.start()
    except OSError as error:
        raise StartupError(
            f"cannot use the lock file {error.filename}: {error.strerror or error}",
            fix="name another one with --leader-lock, or use --placement static",
        ) from error
