"""How hidden states are written into messages: as they are, or in fewer bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from expert_worker.backend import raw_array
from expertmesh.model_config import DtypeName
from expertmesh.wire import WireDtype
from expertmesh.wire_encode import RequestFrame
from expertmesh_kernels.dispatch import as_bits, gather_rows
from expertmesh_kernels.host import TORCH_DTYPES
from expertmesh_kernels.row_quant import quantize_rows

WriteRows = Callable[[npt.NDArray[np.int64], RequestFrame, npt.NDArray[np.bool_]], bool]
"""Writes rows [R] of a batch into a message; sets True for rows that are not finite, in whose place
zeros travel; True if all are finite."""


def row_writer(hidden_TH: Tensor, dtype: WireDtype) -> WriteRows:
    """For the rows of one batch.

    Args:
        hidden_TH: On the host, contiguous.
        dtype: How they travel.
    """
    if dtype == "int8":
        return _int8_writer(hidden_TH)
    return _plain_writer(hidden_TH.to(TORCH_DTYPES[dtype]), dtype)


def _plain_writer(hidden_TH: Tensor, dtype: DtypeName) -> WriteRows:
    bits_TH = as_bits(raw_array(hidden_TH), dtype)

    def write(
        row_ids_R: npt.NDArray[np.int64], frame: RequestFrame, broken_T: npt.NDArray[np.bool_]
    ) -> bool:
        return gather_rows(bits_TH, row_ids_R, dtype, as_bits(frame.rows_RH, dtype), broken_T)

    return write


def _int8_writer(hidden_TH: Tensor) -> WriteRows:
    def write(
        row_ids_R: npt.NDArray[np.int64], frame: RequestFrame, broken_T: npt.NDArray[np.bool_]
    ) -> bool:
        rows_RH: npt.NDArray[np.int8] = frame.rows_RH.view(np.int8)
        return quantize_rows(hidden_TH, row_ids_R, rows_RH, frame.scales_R, broken_T)

    return write
