"""The tensors of a checkpoint, handed out by name: each exactly once."""

from __future__ import annotations

import torch
from torch import Tensor

from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import CheckpointError
from expertmesh_kernels.host import to_torch
from expertmesh_kernels.linear import PackedLinear, pack_linear


class Parameters:
    """Everything outside the experts, read when it is taken: one host copy at a time.

    Args:
        checkpoint: Where the tensors come from.
        dtype: Type of computation; tensors are converted to it unless asked for otherwise.
        device: Where they go.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self._checkpoint = checkpoint
        self._device = device
        self._left = set(checkpoint.parameter_names)

    def take(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor on the device, in this dtype or the one of computation.

        Raises:
            CheckpointError: There is none, it was taken before, or it cannot be read.
        """
        if name not in self._left:
            raise CheckpointError(f"{self._checkpoint.model_dir}: parameter {name} is missing")
        self._left.remove(name)
        host = self._checkpoint.read_parameter(name)
        return to_torch(host.data, host.dtype, dtype or self.dtype).to(self._device)

    def linear(
        self,
        name: str,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        paired: bool = False,
    ) -> PackedLinear:
        """A packed weight, see `pack_linear`; its bias is named after it.

        Raises:
            CheckpointError: One of them is missing or cannot be read.
        """
        bias_N = self.take(f"{name}_bias", dtype) if bias else None
        return pack_linear(self.take(name, dtype), bias_N, paired=paired)

    def check_all_taken(self) -> None:
        """Raises CheckpointError if a tensor has had no use."""
        if self._left:
            unused = ", ".join(sorted(self._left))
            raise CheckpointError(
                f"{self._checkpoint.model_dir}: parameters without a use: {unused}"
            )
