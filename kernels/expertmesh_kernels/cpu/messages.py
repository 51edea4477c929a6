"""Messages in protobuf encoding, read and written in compiled code.

Only what the Forward messages of proto/expertmesh/v1 need: fields 1 to 15, whose tag is one byte,
each at most once. Whatever else a parser would take is not taken here, and goes to one that does.
Numbers of fields are written down here, as what is compiled from them is kept on disk; a test
compares them with the generated code.

Unsigned numbers of 64 bits are held as the int64 of the same bits. `at` is an index of a buffer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import njit

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]

VARINT, FIXED64, LEN = 0, 1, 2
"""Wire types."""
_NO_FIELD = 8
"""In a table of kinds: no wire type."""
NUM_FIELDS = 16
"""Length of the tables of a message, which are indexed by field numbers."""
ABSENT = -1
"""Length of a field that the message does not have."""

CALL_ID_GATEWAY, CALL_ID_EPOCH, CALL_ID_STEP, CALL_ID_LAYER = 1, 2, 3, 4
CALL_ID_MICRO_BATCH, CALL_ID_ATTEMPT = 5, 6
REQUEST_ID, REQUEST_INCARNATION, REQUEST_MODEL_FINGERPRINT, REQUEST_HIDDEN_STATES = 1, 2, 3, 4
REQUEST_ROW_OFFSETS, REQUEST_EXPERT_IDS, REQUEST_NUM_GENERATED_ROWS = 5, 6, 7
REQUEST_TIME_LEFT_US = 8
RESPONSE_ID, RESPONSE_INCARNATION, RESPONSE_OUTPUTS, RESPONSE_ERROR = 1, 2, 3, 4
RESPONSE_QUEUE_US, RESPONSE_COMPUTE_US, RESPONSE_ROW_CREDITS = 5, 6, 7
TENSOR_DTYPE, TENSOR_SHAPE, TENSOR_DATA, TENSOR_ROW_SCALES = 1, 2, 3, 5
REQUEST_CHECKSUM = RESPONSE_CHECKSUM = SEAL = 15
"""The last field of either; see `expertmesh_kernels.cpu.checksum`."""


def _kinds(*kinds: int, last: int = _NO_FIELD) -> Numbers:
    """Wire types of the fields 1, 2, ... and of `SEAL` of a message, by field number."""
    missing = [_NO_FIELD] * (SEAL - 1 - len(kinds))
    table = np.array([_NO_FIELD, *kinds, *missing, last], np.int64)
    table.flags.writeable = False  # as compiled code sees it, so that `scan` is compiled once
    return table


CALL_ID_KINDS = _kinds(FIXED64, VARINT, VARINT, VARINT, VARINT, VARINT)
REQUEST_KINDS = _kinds(LEN, FIXED64, FIXED64, LEN, LEN, LEN, VARINT, VARINT, last=FIXED64)
RESPONSE_KINDS = _kinds(LEN, FIXED64, LEN, LEN, VARINT, VARINT, VARINT, last=FIXED64)
TENSOR_KINDS = _kinds(VARINT, LEN, LEN, _NO_FIELD, LEN)
"""For `scan`. A shape is packed: a run of varints."""


# --- reading ---


@njit
def scan(
    buffer: Bytes, begin: int, end: int, kinds: Numbers, values: Numbers, lengths: Numbers
) -> bool:
    """The fields of the message buffer[begin:end]; tables are indexed by field number.

    Args:
        buffer: Any bytes.
        begin: Of the message.
        end: Of the message, at most the buffer's.
        kinds: Wire types that the fields must have, such as `REQUEST_KINDS`.
        values: Takes numbers, and where bytes begin; 0 for what is absent.
        lengths: Takes lengths of bytes, 0 for numbers, `ABSENT` for what is absent.

    Returns False for what is malformed, unknown, of another wire type, or there twice. A number of
    a field of 32 bits may be larger than that.
    """
    for n in range(NUM_FIELDS):
        values[n], lengths[n] = 0, ABSENT
    at = begin
    while at < end:
        tag = np.int64(buffer[at])
        field, kind = tag >> 3, tag & 7
        if tag > 127 or kind != kinds[field] or lengths[field] != ABSENT:
            return False
        at += 1
        lengths[field] = 0
        if kind == FIXED64:
            if end - at < 8:
                return False
            values[field] = get_fixed(buffer, at, 8)
            at += 8
            continue
        value, at = get_varint(buffer, at, end)
        if at < 0:
            return False
        values[field] = value
        if kind == LEN:
            if value < 0 or value > end - at:
                return False
            values[field], lengths[field] = at, value
            at += int(value)
    return True


@njit
def get_varint(buffer: Bytes, at: int, end: int) -> tuple[np.int64, int]:
    """A number at `at`, and what follows it; -1 for that if it does not end before `end`.

    Neither does one that has more than 64 bits.
    """
    value = np.int64(0)
    for shift in range(0, 64, 7):
        if at >= end:
            return np.int64(0), -1
        byte = np.int64(buffer[at])
        at += 1
        if shift == 63 and byte > 1:
            return np.int64(0), -1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    return np.int64(0), -1


@njit
def get_fixed(buffer: Bytes, at: int, size: int) -> np.int64:
    """A little-endian number of 4 or 8 bytes."""
    value = np.int64(0)
    for i in range(size):
        value |= np.int64(buffer[at + i]) << (8 * i)
    return value


# --- writing: each returns where the next field begins ---


@njit
def put_varint(buffer: Bytes, at: int, value: int) -> int:
    """A number alone."""
    left = np.uint64(value)
    while left > np.uint64(127):
        buffer[at] = np.uint8(left & np.uint64(127)) | np.uint8(128)
        left >>= np.uint64(7)
        at += 1
    buffer[at] = np.uint8(left)
    return at + 1


@njit
def put_fixed(buffer: Bytes, at: int, value: int, size: int) -> int:
    """A little-endian number of 4 or 8 bytes alone."""
    for i in range(size):
        buffer[at + i] = np.uint8((value >> (8 * i)) & 255)
    return at + size


@njit
def put_number(buffer: Bytes, at: int, field: int, value: int) -> int:
    """A field of an integer."""
    buffer[at] = np.uint8(field << 3 | VARINT)
    return put_varint(buffer, at + 1, value)


@njit
def put_fixed64(buffer: Bytes, at: int, field: int, value: int) -> int:
    """A field of 8 bytes."""
    buffer[at] = np.uint8(field << 3 | FIXED64)
    return put_fixed(buffer, at + 1, value, 8)


@njit
def put_length(buffer: Bytes, at: int, field: int, length: int) -> int:
    """What comes before the content of a field of bytes, or of a message."""
    buffer[at] = np.uint8(field << 3 | LEN)
    return put_varint(buffer, at + 1, length)


@njit
def varint_size(value: int) -> int:
    """Bytes of a number."""
    size = 1
    left = np.uint64(value) >> np.uint64(7)
    while left > np.uint64(0):
        left >>= np.uint64(7)
        size += 1
    return size
