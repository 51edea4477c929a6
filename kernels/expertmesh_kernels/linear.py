"""Linear layers with packed weights. R rows, K input features, N output features.

On CPU each output is one FP32 chain acc = fma(x[k], w[k], acc) in ascending k from 0, then the bias
is added, then the result is rounded once: the same bits for a row alone or in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh_kernels.cpu.linear import linear as cpu_linear
from expertmesh_kernels.cpu.tile import PANEL
from expertmesh_kernels.host import as_array

NO_BIAS = np.empty(0, np.float32)
"""As CPU kernels take it."""


@dataclass(frozen=True)
class PackedLinear:
    """Weights in the order in which the device reads them. Made by `pack_linear`."""

    weight_PKC: Tensor
    """Panels of columns, [P, K, C], zero beyond column N: C = 64 on CPU, one panel elsewhere."""
    bias_N: Tensor | None
    out_features: int

    @property
    def in_features(self) -> int:
        """K."""
        return self.weight_PKC.shape[1]

    @property
    def weight_KN(self) -> Tensor:
        """The weights K-major without padding, as a copy."""
        _, depth, _ = self.weight_PKC.shape
        return self.weight_PKC.transpose(0, 1).reshape(depth, -1)[:, : self.out_features]

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return self.weight_PKC.nbytes + (0 if self.bias_N is None else self.bias_N.nbytes)

    @cached_property
    def panels(self) -> NDArray[np.generic]:
        """The weights as CPU kernels take them, flat."""
        return as_array(self.weight_PKC).reshape(-1)

    @cached_property
    def bias(self) -> NDArray[np.float32]:
        """The bias as CPU kernels take it: FP32, empty if there is none."""
        return NO_BIAS if self.bias_N is None else self.bias_N.float().numpy()


def pack_linear(weight_NK: Tensor, bias_N: Tensor | None = None) -> PackedLinear:
    """Reorder a weight as PyTorch stores it; the input may be freed afterwards.

    Raises:
        ValueError: The weight is not a matrix, or the bias does not fit it.
    """
    if weight_NK.ndim != 2:
        raise ValueError(f"weight has shape {tuple(weight_NK.shape)}, expected [out, in]")
    num_columns, depth = weight_NK.shape
    if bias_N is not None and bias_N.shape != (num_columns,):
        raise ValueError(f"bias has shape {tuple(bias_N.shape)}, expected ({num_columns},)")
    width = PANEL if weight_NK.device.type == "cpu" else num_columns
    num_panels = -(-num_columns // width)
    padded = weight_NK.new_zeros(num_panels * width, depth)
    padded[:num_columns] = weight_NK
    panels = padded.view(num_panels, width, depth).transpose(1, 2).contiguous()
    return PackedLinear(panels, None if bias_N is None else bias_N.clone(), num_columns)


def linear(x_RK: Tensor, packed: PackedLinear, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """x @ weight + bias, [R, N]; R may be 0.

    Args:
        x_RK: Any floating dtype.
        packed: Weights on the device of `x_RK`.
        out_dtype: Dtype of the result; that of `x_RK` if None.
    """
    if x_RK.device.type != "cpu":
        return linear_reference(x_RK, packed, out_dtype=out_dtype)
    if x_RK.shape[1] != packed.in_features:
        raise ValueError(f"x has {x_RK.shape[1]} features, expected {packed.in_features}")
    out_RN = torch.empty(x_RK.shape[0], packed.out_features, dtype=out_dtype or x_RK.dtype)
    x, out = as_array(x_RK.float()), as_array(out_RN)
    cpu_linear(x[:, None], packed.panels, packed.bias, out[:, None])
    return out_RN


def linear_reference(
    x_RK: Tensor, packed: PackedLinear, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """What `linear` computes, in PyTorch and FP32; any summation order."""
    out_RN = x_RK.float() @ packed.weight_KN.float()
    if packed.bias_N is not None:
        out_RN = out_RN + packed.bias_N.float()
    return out_RN.to(out_dtype or x_RK.dtype)
