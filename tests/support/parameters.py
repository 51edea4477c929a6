"""All parameters of a checkpoint outside the experts."""

from __future__ import annotations

from expertmesh.checkpoint import Checkpoint, HostTensor


def parameters_of(checkpoint: Checkpoint) -> dict[str, HostTensor]:
    """Each read once, in the order of the forward pass."""
    return {name: checkpoint.read_parameter(name) for name in checkpoint.parameter_names}
