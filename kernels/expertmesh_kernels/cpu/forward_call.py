"""ForwardRequests as most are, read and checked in compiled code; their replies written.

`read_call` takes what `expertmesh.wire_forward` takes, less what is rare: int8, calls without
rows. Whatever it does not take goes to Python, which answers it or says what is wrong; so
nothing is refused here. Replies are, byte by byte, those of `expertmesh.wire_encode`.

Shape letters: R rows of a call, N pairs (row, expert), H hidden size, E experts, L layers of the
model.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.checksum import SEAL_BYTES, is_sealed
from expertmesh_kernels.cpu.frames import LENGTH_BYTES
from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.memory import copy_bytes
from expertmesh_kernels.cpu.messages import (
    ABSENT,
    CALL_ID_ATTEMPT,
    CALL_ID_EPOCH,
    CALL_ID_GATEWAY,
    CALL_ID_KINDS,
    CALL_ID_LAYER,
    CALL_ID_MICRO_BATCH,
    NUM_FIELDS,
    REQUEST_EXPERT_IDS,
    REQUEST_HIDDEN_STATES,
    REQUEST_ID,
    REQUEST_INCARNATION,
    REQUEST_KINDS,
    REQUEST_MODEL_FINGERPRINT,
    REQUEST_NUM_GENERATED_ROWS,
    REQUEST_ROW_OFFSETS,
    REQUEST_TIME_LEFT_US,
    RESPONSE_COMPUTE_US,
    RESPONSE_ID,
    RESPONSE_INCARNATION,
    RESPONSE_OUTPUTS,
    RESPONSE_QUEUE_US,
    RESPONSE_ROW_CREDITS,
    TENSOR_DATA,
    TENSOR_DTYPE,
    TENSOR_KINDS,
    TENSOR_ROW_SCALES,
    TENSOR_SHAPE,
    get_fixed,
    get_varint,
    put_fixed,
    put_fixed64,
    put_length,
    put_number,
    put_varint,
    scan,
    varint_size,
)

UINT32_BYTES = 4
MOST_UINT32 = 2**32 - 1
REPLY_DATA_AT = 128
"""Where outputs lie in the buffer of a reply: behind the longest head, on a cache line."""

NUM_EXPERTS, TOP_K = 0, 1
"""Columns of a table of layers; 0 experts for one without any."""


class Limits(NamedTuple):
    """What a call must fit, and what replies say; in an array of int64 in this order."""

    incarnation: int
    model_fingerprint: int
    dtype_code: int
    itemsize: int
    hidden_size: int
    max_rows: int
    max_message_bytes: int
    exponent: int
    """Bits that are all set in what is not finite."""
    row_credits: int


class Fields(NamedTuple):
    """Where `scan` puts what it finds: [2, NUM_FIELDS], values and lengths."""

    request: NDArray[np.int64]
    call_id: NDArray[np.int64]
    hidden: NDArray[np.int64]


class Call(NamedTuple):
    """Numbers of a call, and where its parts lie in the buffer."""

    layer: int
    num_rows: int
    num_pairs: int
    rows_at: int
    offsets_at: int
    experts_at: int
    time_left_us: int
    """0 means no limit."""


@njit
def limits_of(numbers: NDArray[np.int64]) -> Limits:
    """From an array of the fields: one argument instead of nine."""
    return Limits(
        numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6],
        numbers[7], numbers[8],
    )  # fmt: skip


@njit
def new_fields() -> Fields:
    """For `read_call`."""
    return Fields(
        np.empty((2, NUM_FIELDS), np.int64),
        np.empty((2, NUM_FIELDS), np.int64),
        np.empty((2, NUM_FIELDS), np.int64),
    )


@njit
def read_call(
    buffer: NDArray[np.uint8],
    begin: int,
    end: int,
    limits: Limits,
    layers_LF: NDArray[np.int64],
    fields: Fields,
) -> tuple[bool, Call]:
    """A call of which everything is right but what is in its rows and pairs, or False."""
    values, lengths = fields.request
    call = Call(0, 0, 0, 0, 0, 0, 0)
    if not is_sealed(buffer, begin, end):
        return False, call
    if not scan(buffer, begin, end, REQUEST_KINDS, values, lengths):
        return False, call
    if not (_is_for_us(values, limits) and _read_call_id(buffer, values, lengths, fields.call_id)):
        return False, call
    layer = fields.call_id[0, CALL_ID_LAYER]
    if layer < 0 or layer >= layers_LF.shape[0]:
        return False, call
    num_rows = _read_hidden_states(buffer, values, lengths, limits, fields.hidden)
    if num_rows < 1 or lengths[REQUEST_ROW_OFFSETS] != UINT32_BYTES * (num_rows + 1):
        return False, call
    offsets_at = values[REQUEST_ROW_OFFSETS]
    num_pairs = int(get_fixed(buffer, offsets_at + UINT32_BYTES * num_rows, UINT32_BYTES))
    if num_pairs < 1 or num_pairs > num_rows * layers_LF[layer, TOP_K]:
        return False, call
    if lengths[REQUEST_EXPERT_IDS] != UINT32_BYTES * num_pairs:
        return False, call
    num_generated = values[REQUEST_NUM_GENERATED_ROWS]
    if num_generated < 0 or num_generated > num_rows:
        return False, call
    call = Call(
        layer, num_rows, num_pairs, fields.hidden[0, TENSOR_DATA], offsets_at,
        values[REQUEST_EXPERT_IDS], values[REQUEST_TIME_LEFT_US],
    )  # fmt: skip
    return True, call


@njit
def _is_for_us(values: NDArray[np.int64], limits: Limits) -> bool:
    """Incarnation and model, and a number that is one."""
    return (
        values[REQUEST_INCARNATION] == limits.incarnation
        and values[REQUEST_MODEL_FINGERPRINT] == limits.model_fingerprint
        and _is_uint32(values[REQUEST_TIME_LEFT_US])
    )


@njit
def _read_call_id(
    buffer: NDArray[np.uint8],
    values: NDArray[np.int64],
    lengths: NDArray[np.int64],
    found: NDArray[np.int64],
) -> bool:
    begin, length = values[REQUEST_ID], lengths[REQUEST_ID]
    if length == ABSENT:
        return False
    return (
        scan(buffer, begin, begin + length, CALL_ID_KINDS, found[0], found[1])
        and _is_uint32(found[0, CALL_ID_MICRO_BATCH])
        and _is_uint32(found[0, CALL_ID_ATTEMPT])
    )


@njit
def _read_hidden_states(
    buffer: NDArray[np.uint8],
    values: NDArray[np.int64],
    lengths: NDArray[np.int64],
    limits: Limits,
    found: NDArray[np.int64],
) -> int:
    """R, or -1 for a tensor that is not [R, H] in the dtype of the model, with so much data."""
    begin, length = values[REQUEST_HIDDEN_STATES], lengths[REQUEST_HIDDEN_STATES]
    if length == ABSENT or not scan(
        buffer, begin, begin + length, TENSOR_KINDS, found[0], found[1]
    ):
        return -1
    numbers, sizes = found
    if numbers[TENSOR_DTYPE] != limits.dtype_code:
        return -1
    if sizes[TENSOR_ROW_SCALES] != ABSENT or sizes[TENSOR_SHAPE] == ABSENT:
        return -1
    at, end = numbers[TENSOR_SHAPE], numbers[TENSOR_SHAPE] + sizes[TENSOR_SHAPE]
    num_rows, at = get_varint(buffer, at, end)
    if at < 0 or num_rows < 1 or num_rows > limits.max_rows:
        return -1
    hidden_size, at = get_varint(buffer, at, end)
    if at != end or hidden_size != limits.hidden_size:
        return -1
    if sizes[TENSOR_DATA] != num_rows * hidden_size * limits.itemsize:
        return -1
    return int(num_rows)


@njit
def _is_uint32(value: int) -> bool:
    return 0 <= value <= MOST_UINT32


@njit
def put_reply_head(
    reply: NDArray[np.uint8],
    call: Call,
    call_id: NDArray[np.int64],
    limits: Limits,
    queue_us: int,
    compute_us: int,
) -> int:
    """Everything of a framed ForwardResponse that comes before its outputs at REPLY_DATA_AT.

    A seal is to follow the outputs.

    Returns where it begins.
    """
    num_bytes = call.num_pairs * limits.hidden_size * limits.itemsize
    at = LENGTH_BYTES + 2
    end = _put_call_id(reply, at, call_id)
    put_length(reply, LENGTH_BYTES, RESPONSE_ID, end - at)  # less than 128: two bytes
    at = put_fixed64(reply, end, RESPONSE_INCARNATION, limits.incarnation)
    at = put_number(reply, at, RESPONSE_QUEUE_US, queue_us)
    at = put_number(reply, at, RESPONSE_COMPUTE_US, compute_us)
    at = put_number(reply, at, RESPONSE_ROW_CREDITS, limits.row_credits)
    shape_size = varint_size(call.num_pairs) + varint_size(limits.hidden_size)
    tensor_size = 5 + shape_size + varint_size(num_bytes) + num_bytes
    at = put_length(reply, at, RESPONSE_OUTPUTS, tensor_size)
    at = put_number(reply, at, TENSOR_DTYPE, limits.dtype_code)
    at = put_length(reply, at, TENSOR_SHAPE, shape_size)
    at = put_varint(reply, at, call.num_pairs)
    at = put_varint(reply, at, limits.hidden_size)
    at = put_length(reply, at, TENSOR_DATA, num_bytes)
    put_fixed(reply, 0, at - LENGTH_BYTES + num_bytes + SEAL_BYTES, LENGTH_BYTES)
    begin = REPLY_DATA_AT - at
    copy_bytes(reply.ctypes.data + begin, reply.ctypes.data, at)
    return begin


@njit
def _put_call_id(reply: NDArray[np.uint8], at: int, numbers: NDArray[np.int64]) -> int:
    """Without fields that are 0, as serialized messages are."""
    if numbers[CALL_ID_GATEWAY] != 0:
        at = put_fixed64(reply, at, CALL_ID_GATEWAY, numbers[CALL_ID_GATEWAY])
    for field in range(CALL_ID_EPOCH, CALL_ID_ATTEMPT + 1):
        if numbers[field] != 0:
            at = put_number(reply, at, field, numbers[field])
    return at
