"""What places the experts of a gateway, by its settings."""

from __future__ import annotations

from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import StartupError
from expertmesh.expert_plan import ExpertPlan
from expertmesh.safetensors_file import STORAGE
from expertmesh.settings import MeshOptions
from gateway.placement.controller import PlacementController, Workers
from gateway.placement.election import FileElection
from gateway.placement.lock_path import lock_path
from gateway.placement.operator import Operator, StaticPlacement
from gateway.placement.order_calls import OrderCalls
from gateway.placement.state import Experts, PlacementPolicy


def make_placement(
    mesh: MeshOptions, checkpoint: Checkpoint, expert_plan: ExpertPlan, workers: Workers
) -> Operator:
    """The placement; nothing runs yet.

    Args:
        mesh: Where experts are, and who decides it.
        checkpoint: The model.
        expert_plan: How its experts are held.
        workers: Who knows the expert workers.
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
        FileElection(lock_path(mesh)),
        OrderCalls,
    )


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
