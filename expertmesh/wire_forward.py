"""The messages of `ExpertService.Forward`: calls and replies, encoded and checked.

Used by both ends. Every check comes before any allocation that a peer could choose the size of,
and raises a `WireError` that names field, value and expectation. Arrays are read-only views.

Shape letters: R rows of a call, N pairs (row, expert), H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from expertmesh.errors import WireError
from expertmesh.model_config import DtypeName, GateConfig, ModelConfig
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import (
    DTYPE_CODES,
    UINT32,
    RawArray,
    all_finite,
    decode_tensor,
    fingerprint64,
    finite_rows,
    invalid,
    write_tensor,
)


@dataclass(frozen=True)
class ForwardLimits:
    """What an expert worker expects of a ForwardRequest."""

    incarnation: int
    model_fingerprint: int
    dtype: DtypeName
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


@dataclass(frozen=True)
class ForwardCall:
    """A checked ForwardRequest. The arrays are read-only views of the message."""

    layer: int
    hidden_RH: RawArray
    dtype: DtypeName
    row_offsets: npt.NDArray[np.uint32]
    """[R + 1] CSR offsets into expert_ids_N, strictly increasing from 0."""
    expert_ids_N: npt.NDArray[np.uint32]
    num_generated_rows: int
    time_left_us: int
    """0 means no limit."""
    want_crc32: bool

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


class RowsToSend(Protocol):
    """The routing part of a call, as the dispatch plan has it."""

    @property
    def row_offsets(self) -> npt.NDArray[np.uint32]:
        """[R + 1] CSR offsets."""

    @property
    def expert_ids_N(self) -> npt.NDArray[np.uint32]:
        """[N] expert of each pair, strictly increasing within a row."""

    @property
    def num_generated_rows(self) -> int:
        """Leading rows that belong to generated tokens."""


@dataclass(frozen=True)
class CallTarget:
    """Whom a call is meant for."""

    incarnation: int
    model_fingerprint: int


def encode_forward_request(
    call_id: pb.CallId,
    target: CallTarget,
    hidden_RH: RawArray,
    dtype: DtypeName,
    rows: RowsToSend,
    *,
    time_left_us: int = 0,
    crc: bool = False,
) -> pb.ForwardRequest:
    """A ForwardRequest; `hidden_RH` holds exactly the rows of `rows`, each once."""
    message = pb.ForwardRequest(
        id=call_id,
        incarnation=target.incarnation,
        model_fingerprint=target.model_fingerprint,
        row_offsets=rows.row_offsets.tobytes(),
        expert_ids=rows.expert_ids_N.tobytes(),
        num_generated_rows=rows.num_generated_rows,
        time_left_us=min(time_left_us, 2**32 - 1),
        want_crc32=crc,
    )
    write_tensor(message.hidden_states, hidden_RH, dtype, crc=crc)
    return message


def decode_forward_request(message: pb.ForwardRequest, limits: ForwardLimits) -> ForwardCall:
    """A checked call: everything but whether the experts are resident.

    Raises:
        WireError: With the code to answer and a message that names field, value and expectation.
    """
    gate = _check_address(message, limits)
    hidden_RH, dtype = _decode_hidden_states(message.hidden_states, limits)
    num_rows = hidden_RH.shape[0]
    offsets = _decode_row_offsets(message.row_offsets, num_rows)
    expert_ids_N = _decode_expert_ids(message.expert_ids, offsets, gate)
    if message.num_generated_rows > num_rows:
        raise invalid(
            f"num_generated_rows is {message.num_generated_rows}, expected at most {num_rows} rows"
        )
    if not all_finite(hidden_RH, dtype):
        row = int(np.flatnonzero(~finite_rows(hidden_RH, dtype))[0])
        raise WireError(
            pb.ForwardError.CODE_NONFINITE_INPUT,
            f"hidden_states row {row} has a NaN or infinite element, expected finite ones",
        )
    return ForwardCall(
        layer=message.id.layer,
        hidden_RH=hidden_RH,
        dtype=dtype,
        row_offsets=offsets,
        expert_ids_N=expert_ids_N,
        num_generated_rows=message.num_generated_rows,
        time_left_us=message.time_left_us,
        want_crc32=message.want_crc32,
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


def _decode_hidden_states(message: pb.Tensor, limits: ForwardLimits) -> tuple[RawArray, DtypeName]:
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
    if message.dtype != DTYPE_CODES[limits.dtype]:
        raise invalid(
            f"hidden_states.dtype is {message.dtype}, "
            f"expected {DTYPE_CODES[limits.dtype]} ({limits.dtype})"
        )
    return decode_tensor(message, "hidden_states")


def _decode_row_offsets(data: bytes, num_rows: int) -> npt.NDArray[np.uint32]:
    expected = (num_rows + 1) * UINT32.itemsize
    if len(data) != expected:
        raise invalid(f"row_offsets has {len(data)} bytes, expected {expected} for {num_rows} rows")
    offsets = np.frombuffer(data, dtype=UINT32)
    if offsets[0] != 0:
        raise invalid(f"row_offsets starts with {offsets[0]}, expected 0")
    falling = np.flatnonzero(offsets[1:] <= offsets[:-1])
    if falling.size:
        row = int(falling[0])
        raise invalid(
            f"row_offsets has {offsets[row + 1]} after {offsets[row]} at row {row}, expected "
            "strictly increasing values"
        )
    return offsets


def _decode_expert_ids(
    data: bytes, offsets: npt.NDArray[np.uint32], gate: GateConfig
) -> npt.NDArray[np.uint32]:
    num_pairs = int(offsets[-1])
    if len(data) != num_pairs * UINT32.itemsize:
        raise invalid(
            f"expert_ids has {len(data)} bytes, expected {num_pairs * UINT32.itemsize} for "
            f"{num_pairs} pairs, the last of row_offsets"
        )
    expert_ids = np.frombuffer(data, dtype=UINT32)
    if not num_pairs:
        return expert_ids
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
    return expert_ids


# --- Forward replies ------------------------------------------------------------------------------


def decode_outputs(
    message: pb.ForwardResponse, shape: tuple[int, int], dtype: DtypeName
) -> RawArray:
    """The outputs of a reply, [N, H], a read-only view.

    Args:
        message: A reply whose id was matched already.
        shape: Pairs of the call, hidden size.
        dtype: Type of the call's hidden states.

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
    if not all_finite(outputs_NH, dtype):
        raise WireError(
            pb.ForwardError.CODE_DATA_LOSS,
            "outputs have a NaN or infinite element, expected finite ones",
        )
    return outputs_NH
