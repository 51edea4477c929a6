"""Hidden states in a quarter or half of their bytes: int8 with one FP32 scale per row.

T rows of a batch, R rows of a message, H hidden size. Symmetric: scale = max |x| / 127, so an
element is off by at most half a scale, and by its rounding to the dtype of the model.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh_kernels.cpu import row_quant as cpu
from expertmesh_kernels.host import as_array


def quantize_rows(
    source_TH: Tensor,
    row_ids_R: NDArray[np.int64],
    out_RH: NDArray[np.int8],
    scales_R: NDArray[np.float32],
    broken_T: NDArray[np.bool_],
) -> bool:
    """Quantise chosen rows into a message; True if all are finite.

    Args:
        source_TH: Rows of the batch, on the host.
        row_ids_R: Which of them.
        out_RH: Takes the elements; zeros for a row that is not finite.
        scales_R: Takes the scales.
        broken_T: True is set for rows with a NaN or infinite element.
    """
    return not cpu.quantize_rows(as_array(source_TH), row_ids_R, out_RH, scales_R, broken_T)


def dequantize_rows(
    source_RH: NDArray[np.int8], scales_R: NDArray[np.float32], out_RH: Tensor
) -> int:
    """Undo `quantize_rows`; the first row with an element that is too large, or -1.

    Args:
        source_RH: Elements; may be read-only, as the next.
        scales_R: Finite and not negative.
        out_RH: Takes the rows, in the dtype of the model.
    """
    return cpu.dequantize_rows(source_RH, scales_R, as_array(out_RH))


def quantize_reference(source_RH: Tensor) -> tuple[Tensor, Tensor]:
    """What `quantize_rows` computes for all rows, in PyTorch: elements and scales."""
    wide_RH = source_RH.float()
    most_R1 = wide_RH.abs().amax(1, keepdim=True)
    factor_R1 = torch.where(most_R1 < 1e-35, 0.0, 127.0 / most_R1)
    scales_R1 = torch.where(most_R1 < 1e-35, 0.0, most_R1 / 127.0)
    return (wide_RH * factor_R1).round().to(torch.int8), scales_R1[:, 0]
