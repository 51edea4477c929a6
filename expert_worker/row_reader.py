"""Rows and pairs out of calls, checked and copied once, whichever way the rows travelled."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from expertmesh.errors import WireError
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire_forward import ForwardCall, ForwardLimits, check_rows
from expertmesh_kernels.dispatch import (
    CallRows,
    as_bits,
    empty_bits,
    unpack_call,
    unpack_pairs,
)
from expertmesh_kernels.host import TORCH_DTYPES
from expertmesh_kernels.row_quant import dequantize_rows


def read_rows(call: ForwardCall, limits: ForwardLimits) -> tuple[Tensor, CallRows]:
    """Hidden states in the dtype of the model, and the pairs, of a call that is all right.

    Raises:
        WireError: What is wrong with it.
    """
    if call.dtype == "int8":
        return _read_int8(call, limits)
    bits_RH = empty_bits((call.num_rows, limits.hidden_size), call.dtype)
    rows = unpack_call(
        as_bits(call.hidden_RH, call.dtype), call.row_offsets, call.expert_ids_N,
        call.gate.num_experts, call.gate.top_k, call.dtype, bits_RH,
    )  # fmt: skip
    x_RH = torch.from_numpy(bits_RH).view(TORCH_DTYPES[call.dtype])
    return x_RH.to(TORCH_DTYPES[limits.dtype]), _checked(rows, call)


def _read_int8(call: ForwardCall, limits: ForwardLimits) -> tuple[Tensor, CallRows]:
    rows = unpack_pairs(
        call.num_rows, call.row_offsets, call.expert_ids_N, call.gate.num_experts, call.gate.top_k
    )
    x_RH = torch.empty(call.num_rows, limits.hidden_size, dtype=TORCH_DTYPES[limits.dtype])
    row = dequantize_rows(call.hidden_RH.view(np.int8), call.scales_R, x_RH)
    if row >= 0:
        raise WireError(
            pb.ForwardError.CODE_NONFINITE_INPUT,
            f"hidden_states row {row} times its scale {call.scales_R[row]} is too large for "
            f"{limits.dtype}",
        )
    return x_RH, _checked(rows, call)


def _checked(rows: CallRows | None, call: ForwardCall) -> CallRows:
    """The pairs; the reference checks say what is wrong if there are none."""
    if rows is None:
        check_rows(call)
        raise AssertionError("a kernel refused a call that is all right")
    return rows
