"""The messages of `ExpertService.Forward`, checked; `expertmesh.wire_encode` writes them.

Used by both ends. Every check comes before any allocation that a peer could choose the size of,
and raises a `WireError` that names field, value and expectation. Arrays are read-only views.

Shape letters: R rows of a call, N pairs (row, expert), H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from expertmesh.errors import WireError
from expertmesh.model_config import DtypeName, GateConfig, ModelConfig
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import (
    UINT32,
    WIRE_CODES,
    RawArray,
    WireDtype,
    all_finite,
    decode_scales,
    decode_tensor,
    fingerprint64,
    finite_rows,
    invalid,
    wire_dtypes,
)


@dataclass(frozen=True)
class ForwardLimits:
    """What an expert worker expects of a ForwardRequest."""

    incarnation: int
    model_fingerprint: int
    dtype: DtypeName
    """Of computation and of outputs."""
    hidden_size: int
    num_layers: int
    gates: Mapping[int, GateConfig]
    """MoE layer to its number of experts and experts per row."""
    max_rows: int
    """Row credits of a stream."""

    @staticmethod
    def of(
        config: ModelConfig,
        dtype: DtypeName,
        *,
        incarnation: int,
        model_fingerprint: bytes,
        max_rows: int,
    ) -> ForwardLimits:
        """Limits for one life of an expert worker of this model."""
        return ForwardLimits(
            incarnation=incarnation,
            model_fingerprint=fingerprint64(model_fingerprint),
            dtype=dtype,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            gates={layer: config.moe_ffn(layer).gate for layer in config.moe_layers},
            max_rows=max_rows,
        )

    @cached_property
    def _wire_codes(self) -> frozenset[int]:
        return frozenset(WIRE_CODES[dtype] for dtype in wire_dtypes(self.dtype))

    def takes(self, dtype_code: int) -> bool:
        """True if hidden states may travel as this `expertmesh.v1.Dtype`."""
        return dtype_code in self._wire_codes


@dataclass(frozen=True)
class ForwardCall:
    """A ForwardRequest. The arrays are read-only views of the message."""

    layer: int
    gate: GateConfig
    """Of the layer."""
    hidden_RH: RawArray
    dtype: WireDtype
    """Of the hidden states."""
    scales_R: npt.NDArray[np.float32]
    """[R] if they are int8, else empty."""
    row_offsets: npt.NDArray[np.uint32]
    """[R + 1] CSR offsets into expert_ids_N, strictly increasing from 0."""
    expert_ids_N: npt.NDArray[np.uint32]
    num_generated_rows: int
    time_left_us: int
    """0 means no limit."""

    @property
    def num_rows(self) -> int:
        """Token rows."""
        return int(self.hidden_RH.shape[0])

    @property
    def num_pairs(self) -> int:
        """(row, expert) pairs."""
        return int(self.expert_ids_N.shape[0])

    def row_of_pair_N(self) -> npt.NDArray[np.int64]:
        """[N] row of each pair, ascending."""
        return np.repeat(np.arange(self.num_rows, dtype=np.int64), np.diff(self.row_offsets))


def decode_forward_request(message: pb.ForwardRequest, limits: ForwardLimits) -> ForwardCall:
    """A checked call: everything but whether the experts are resident.

    Raises:
        WireError: With the code to answer and a message that names field, value and expectation.
    """
    call = view_forward_request(message, limits)
    check_rows(call)
    return call


def view_forward_request(message: pb.ForwardRequest, limits: ForwardLimits) -> ForwardCall:
    """A call of which everything is checked but what is in its rows and pairs.

    Raises:
        WireError: As `decode_forward_request`.
    """
    gate = _check_address(message, limits)
    hidden_RH, dtype = _decode_hidden_states(message.hidden_states, limits)
    num_rows = hidden_RH.shape[0]
    offsets = _view_uint32("row_offsets", message.row_offsets, num_rows + 1, f"{num_rows} rows")
    num_pairs = int(offsets[-1])
    expert_ids_N = _view_uint32(
        "expert_ids", message.expert_ids, num_pairs, f"{num_pairs} pairs, the last of row_offsets"
    )
    if message.num_generated_rows > num_rows:
        raise invalid(
            f"num_generated_rows is {message.num_generated_rows}, expected at most {num_rows} rows"
        )
    return ForwardCall(
        layer=message.id.layer,
        gate=gate,
        hidden_RH=hidden_RH,
        dtype=dtype,
        scales_R=decode_scales(message.hidden_states, "hidden_states"),
        row_offsets=offsets,
        expert_ids_N=expert_ids_N,
        num_generated_rows=message.num_generated_rows,
        time_left_us=message.time_left_us,
    )


def check_rows(call: ForwardCall) -> None:
    """Checks what is in the rows and pairs of a call, and names what is wrong.

    Raises:
        WireError: As `decode_forward_request`.
    """
    _check_row_offsets(call.row_offsets)
    _check_expert_ids(call.expert_ids_N, call.row_offsets, call.gate)
    if call.dtype != "int8" and not all_finite(call.hidden_RH, call.dtype):
        row = int(np.flatnonzero(~finite_rows(call.hidden_RH, call.dtype))[0])
        raise WireError(
            pb.ForwardError.CODE_NONFINITE_INPUT,
            f"hidden_states row {row} has a NaN or infinite element, expected finite ones",
        )


def _check_address(message: pb.ForwardRequest, limits: ForwardLimits) -> GateConfig:
    """Checks id, incarnation, model and layer; the gate of the layer."""
    if not message.HasField("id"):
        raise invalid("id is missing, expected the identity of the call")
    if message.incarnation != limits.incarnation:
        raise WireError(
            pb.ForwardError.CODE_STALE_INCARNATION,
            f"incarnation is {message.incarnation:#x}, expected {limits.incarnation:#x}",
        )
    if message.model_fingerprint != limits.model_fingerprint:
        raise WireError(
            pb.ForwardError.CODE_WRONG_MODEL,
            f"model_fingerprint is {message.model_fingerprint:#x}, "
            f"expected {limits.model_fingerprint:#x}",
        )
    gate = limits.gates.get(message.id.layer)
    if gate is None:
        raise invalid(
            f"id.layer is {message.id.layer}, expected an MoE layer of {limits.num_layers} layers"
        )
    return gate


def _decode_hidden_states(message: pb.Tensor, limits: ForwardLimits) -> tuple[RawArray, WireDtype]:
    shape = tuple(message.shape)
    if len(shape) != 2 or shape[1] != limits.hidden_size:
        raise invalid(
            f"hidden_states.shape is {list(shape[:8])}, expected [rows, {limits.hidden_size}]"
        )
    if shape[0] > limits.max_rows:
        raise WireError(
            pb.ForwardError.CODE_RESOURCE_EXHAUSTED,
            f"hidden_states has {shape[0]} rows, expected at most the {limits.max_rows} row "
            "credits of a stream",
        )
    if not limits.takes(message.dtype):
        accepted = ", ".join(
            f"{WIRE_CODES[dtype]} ({dtype})" for dtype in wire_dtypes(limits.dtype)
        )
        raise invalid(f"hidden_states.dtype is {message.dtype}, expected one of {accepted}")
    return decode_tensor(message, "hidden_states")


def _view_uint32(field: str, data: bytes, count: int, what: str) -> npt.NDArray[np.uint32]:
    expected = count * UINT32.itemsize
    if len(data) != expected:
        raise invalid(f"{field} has {len(data)} bytes, expected {expected} for {what}")
    return np.frombuffer(data, dtype=UINT32)


def _check_row_offsets(offsets: npt.NDArray[np.uint32]) -> None:
    if offsets[0] != 0:
        raise invalid(f"row_offsets starts with {offsets[0]}, expected 0")
    falling = np.flatnonzero(offsets[1:] <= offsets[:-1])
    if falling.size:
        row = int(falling[0])
        raise invalid(
            f"row_offsets has {offsets[row + 1]} after {offsets[row]} at row {row}, expected "
            "strictly increasing values"
        )


def _check_expert_ids(
    expert_ids: npt.NDArray[np.uint32], offsets: npt.NDArray[np.uint32], gate: GateConfig
) -> None:
    if not expert_ids.size:
        return
    if int(expert_ids.max()) >= gate.num_experts:
        raise invalid(
            f"expert_ids has {int(expert_ids.max())}, expected ids below {gate.num_experts}"
        )
    if int(np.diff(offsets).max()) > gate.top_k:
        raise invalid(
            f"row_offsets gives a row {int(np.diff(offsets).max())} experts, "
            f"expected at most {gate.top_k}"
        )
    rising = expert_ids[1:] > expert_ids[:-1]
    rising[offsets[1:-1] - 1] = True  # from the last pair of a row to the first of the next
    if not rising.all():
        pair = int(np.flatnonzero(~rising)[0])
        raise invalid(
            f"expert_ids has {expert_ids[pair + 1]} after {expert_ids[pair]} at pair {pair}, "
            "expected strictly increasing ids within a row"
        )


# --- Forward replies ------------------------------------------------------------------------------


def view_outputs(message: pb.ForwardResponse, shape: tuple[int, int], dtype: DtypeName) -> RawArray:
    """The outputs of a reply, [N, H], a read-only view; elements may be NaN or infinite.

    Args:
        message: A reply whose id was matched already.
        shape: Pairs of the call, hidden size.
        dtype: Of the model.

    Raises:
        WireError: The reply's own error, or what is wrong with the outputs.
    """
    if message.HasField("error"):
        error = message.error
        raise WireError(error.code, error.message, expert_ids=error.expert_ids)
    if not message.HasField("outputs"):
        raise invalid("result is missing, expected outputs or error")
    outputs_NH, got = decode_tensor(message.outputs, "outputs")
    if outputs_NH.shape != shape or got != dtype:
        raise invalid(
            f"outputs are {list(outputs_NH.shape)} of {got}, expected {list(shape)} of {dtype}"
        )
    return outputs_NH


def broken_outputs() -> WireError:
    """The error for outputs that are not finite."""
    return WireError(
        pb.ForwardError.CODE_DATA_LOSS,
        "outputs have a NaN or infinite element, expected finite ones",
    )
