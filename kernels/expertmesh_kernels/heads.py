"""One linear layer per head. T rows, n heads, K input features and N output features of a head.

The same chains as `expertmesh_kernels.linear`: a head of a row has the same bits in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh_kernels.cpu.linear import head_linear as cpu_head_linear
from expertmesh_kernels.host import as_array
from expertmesh_kernels.linear import pack_linear


@dataclass(frozen=True)
class PackedHeads:
    """Weights in the order in which the device reads them. Made by `pack_heads`."""

    weight_nPKC: Tensor
    """Panels of each head; see `PackedLinear`."""
    out_features: int

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return self.weight_nPKC.nbytes

    @property
    def weight_nKN(self) -> Tensor:
        """The weights K-major without padding, as a copy."""
        num_heads, _, depth, _ = self.weight_nPKC.shape
        return self.weight_nPKC.transpose(1, 2).reshape(num_heads, depth, -1)[
            ..., : self.out_features
        ]

    @cached_property
    def panels(self) -> NDArray[np.generic]:
        """The weights as CPU kernels take them, flat."""
        return as_array(self.weight_nPKC).reshape(-1)


def pack_heads(weight_nNK: Tensor) -> PackedHeads:
    """Reorder the weights of all heads; the input may be freed afterwards.

    Raises:
        ValueError: The weight does not have three dimensions.
    """
    if weight_nNK.ndim != 3:
        raise ValueError(f"weight has shape {tuple(weight_nNK.shape)}, expected [heads, out, in]")
    panels = [pack_linear(weight_NK, format="panels").weight for weight_NK in weight_nNK]
    return PackedHeads(torch.stack(panels), weight_nNK.shape[1])


def head_linear(x_TnK: Tensor, packed: PackedHeads) -> Tensor:
    """x @ weight, head by head, [T, n, N], in the dtype of x; T may be 0.

    Args:
        x_TnK: Any floating dtype and strides.
        packed: Weights on the device of `x_TnK`.
    """
    num_heads, _, depth, _ = packed.weight_nPKC.shape
    if x_TnK.shape[1:] != (num_heads, depth):
        raise ValueError(f"x has shape {tuple(x_TnK.shape)}, expected [T, {num_heads}, {depth}]")
    if x_TnK.device.type == "cuda":
        from expertmesh_kernels.triton import ops

        return ops.run_head_linear(x_TnK, packed)
    if x_TnK.device.type != "cpu":
        return head_linear_reference(x_TnK, packed)
    out_TnN = x_TnK.new_empty(len(x_TnK), num_heads, packed.out_features)
    cpu_head_linear(as_array(x_TnK.float()), packed.panels, as_array(out_TnN))
    return out_TnN


def head_linear_reference(x_TnK: Tensor, packed: PackedHeads) -> Tensor:
    """What `head_linear` computes, in PyTorch and FP32; any summation order."""
    out_nTN = x_TnK.float().transpose(0, 1) @ packed.weight_nKN.float()
    return out_nTN.transpose(0, 1).to(x_TnK.dtype).contiguous()
