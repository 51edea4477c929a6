"""Forward messages written byte by byte: one buffer a message, rows copied into it once.

The bytes are those of `ForwardRequest` and `ForwardResponse` in proto/expertmesh/v1, which every
protobuf parser takes. They are assembled here because filling generated classes copies tensors
three times and costs more than sending the message. Data comes last, behind all other fields but
the checksum.

    frame = length (uint32, little-endian) | message      gRPC takes the message alone

Shape letters: R rows of a call, N pairs (row, expert), H hidden size.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from expertmesh.checksum import SEAL_BYTES, seal
from expertmesh.model_config import DtypeName
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import WIRE_CODES, WIRE_NUMPY, RawArray, WireDtype

LENGTH = struct.Struct("<I")
"""In front of a message on a direct connection."""

_ALIGNMENT = 16
_CACHED_SHAPES = 4096
_CACHED_IDS = 16  # one id goes to several expert workers
_TWO_FIXED64 = struct.Struct("<BQBQ")
_FIXED64 = struct.Struct("<BQ")
_LEN = 2  # wire type of messages, bytes and packed numbers


def _tag(message: str, field: str, wire_type: int) -> int:
    """Number of a field and how it travels, from the generated code, so that both agree."""
    number = pb.DESCRIPTOR.message_types_by_name[message].fields_by_name[field].number
    assert number < 16, "tags of one byte"
    return int(number) << 3 | wire_type


def _bytes_tag(message: str, field: str) -> bytes:
    return bytes((_tag(message, field, _LEN),))


def _varint_tag(message: str, field: str) -> bytes:
    return bytes((_tag(message, field, 0),))


_ID_GATEWAY = _tag("CallId", "gateway", 1)
_ID_TAGS = tuple(
    _varint_tag("CallId", field) for field in ("epoch", "step", "layer", "micro_batch", "attempt")
)
_REQUEST_ID = _bytes_tag("ForwardRequest", "id")
_REQUEST_INCARNATION = _tag("ForwardRequest", "incarnation", 1)
_REQUEST_FINGERPRINT = _tag("ForwardRequest", "model_fingerprint", 1)
_REQUEST_HIDDEN = _bytes_tag("ForwardRequest", "hidden_states")
_REQUEST_OFFSETS = _bytes_tag("ForwardRequest", "row_offsets")
_REQUEST_EXPERTS = _bytes_tag("ForwardRequest", "expert_ids")
_REQUEST_GENERATED = _varint_tag("ForwardRequest", "num_generated_rows")
_REQUEST_TIME_LEFT = _varint_tag("ForwardRequest", "time_left_us")
_TENSOR_DTYPE = _varint_tag("Tensor", "dtype")
_TENSOR_SHAPE = _bytes_tag("Tensor", "shape")
_TENSOR_DATA = _bytes_tag("Tensor", "data")
_TENSOR_SCALES = _bytes_tag("Tensor", "row_scales")
_RESPONSE_ID = _bytes_tag("ForwardResponse", "id")
_RESPONSE_INCARNATION = _tag("ForwardResponse", "incarnation", 1)
_RESPONSE_OUTPUTS = _bytes_tag("ForwardResponse", "outputs")
_RESPONSE_NUMBERS = tuple(
    _varint_tag("ForwardResponse", field) for field in ("queue_us", "compute_us", "row_credits")
)


class CallId(NamedTuple):
    """Identity of a call, as `expertmesh.v1.CallId`; replies are matched by it."""

    gateway: int
    epoch: int
    step: int
    layer: int
    micro_batch: int
    attempt: int = 0

    @staticmethod
    def of(message: pb.CallId) -> CallId:
        """The identity in a message."""
        return CallId(
            message.gateway,
            message.epoch,
            message.step,
            message.layer,
            message.micro_batch,
            message.attempt,
        )


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

    @cached_property
    def encoded(self) -> bytes:
        """Its fields of a ForwardRequest."""
        return _TWO_FIXED64.pack(
            *(_REQUEST_INCARNATION, self.incarnation),
            *(_REQUEST_FINGERPRINT, self.model_fingerprint),
        )


class RequestFrame:
    """A ForwardRequest whose rows are still to be written: fill `rows_RH`, then call `finish`.

    Args:
        call_id: Of the call.
        target: Whom it is meant for.
        rows: Its routing; the message has exactly these rows.
        hidden_size: H.
        dtype: How rows travel.
        time_left_us: 0 means no limit.
    """

    def __init__(
        self,
        call_id: CallId,
        target: CallTarget,
        rows: RowsToSend,
        hidden_size: int,
        dtype: WireDtype,
        *,
        time_left_us: int = 0,
    ) -> None:
        num_rows = len(rows.row_offsets) - 1
        shape = (num_rows, hidden_size)
        numpy_dtype = WIRE_NUMPY[dtype]
        num_bytes = num_rows * hidden_size * numpy_dtype.itemsize
        tail = _scales_head(num_rows) if dtype == "int8" else b""
        num_tail = len(tail) + (4 * num_rows if tail else 0)
        tensor = _tensor_head(dtype, shape, num_bytes)
        fields = _request_fields(call_id, target, rows, time_left_us)
        length = len(tensor) + num_bytes + num_tail
        head = b"".join((fields, _REQUEST_HIDDEN, _varint(length), tensor))
        data_at = LENGTH.size + len(head)
        pad = -data_at % _ALIGNMENT  # so that the rows are aligned as their type wants it
        buffer = np.empty(pad + data_at + num_bytes + num_tail + SEAL_BYTES, np.uint8)
        self._bytes = memoryview(buffer.data)[pad:]
        LENGTH.pack_into(self._bytes, 0, len(self._bytes) - LENGTH.size)
        self._bytes[LENGTH.size : data_at] = head
        data_end = pad + data_at + num_bytes
        self.num_rows = num_rows
        self.rows_RH: RawArray = buffer[pad + data_at : data_end].view(numpy_dtype).reshape(shape)
        """[R, H] in the message."""
        self.scales_R: npt.NDArray[np.float32] = np.empty(num_rows if tail else 0, np.float32)
        """[R] scale of each row; only int8 rows have any."""
        self._data_at, self._tail = data_at, tail

    def finish(self) -> None:
        """Writes what follows the rows."""
        if self._tail:
            at = self._data_at + self.rows_RH.nbytes
            self._bytes[at:-SEAL_BYTES] = self._tail + self.scales_R.tobytes()
        self._bytes[-SEAL_BYTES:] = seal(self._bytes[LENGTH.size : -SEAL_BYTES])

    @property
    def framed(self) -> memoryview:
        """Length and message."""
        return self._bytes

    @property
    def message(self) -> bytes:
        """The message alone, as a copy."""
        return bytes(self._bytes[LENGTH.size :])

    @property
    def num_payload_bytes(self) -> int:
        """Bytes of the rows."""
        return self.rows_RH.nbytes


@dataclass(frozen=True)
class ReplyHead:
    """What a reply says beside its outputs."""

    call_id: bytes
    """A serialized CallId."""
    incarnation: int
    queue_us: int
    compute_us: int
    row_credits: int


Parts = list[bytes | memoryview]
"""A frame in pieces, which nobody joins before the kernel copies them into the socket."""


def encode_reply(head: ReplyHead, outputs_NH: RawArray, dtype: DtypeName) -> Parts:
    """A framed ForwardResponse with outputs.

    Args:
        head: The other fields.
        outputs_NH: C-contiguous; not copied, so it must stay as it is until it is sent.
        dtype: What its elements are.
    """
    data = memoryview(outputs_NH.reshape(-1).view(np.uint8).data)
    tensor = _tensor_head(dtype, outputs_NH.shape, len(data))
    numbers = (head.queue_us, head.compute_us, head.row_credits)
    fields = [_RESPONSE_ID, _varint(len(head.call_id)), head.call_id]
    fields.append(_FIXED64.pack(_RESPONSE_INCARNATION, head.incarnation))
    for tag, number in zip(_RESPONSE_NUMBERS, numbers, strict=True):
        fields += (tag, _varint(number))
    fields += (_RESPONSE_OUTPUTS, _varint(len(tensor) + len(data)), tensor)
    start = b"".join(fields)
    length = len(start) + len(data) + SEAL_BYTES
    return [LENGTH.pack(length) + start, data, seal(start, data)]


def frame_of(message: bytes) -> Parts:
    """A framed message that is serialized already."""
    return [LENGTH.pack(len(message)) + message]


def join_message(parts: Parts) -> bytes:
    """The message of a frame in one piece, as gRPC wants it."""
    return b"".join((memoryview(parts[0])[LENGTH.size :], *parts[1:]))


def _request_fields(
    call_id: CallId, target: CallTarget, rows: RowsToSend, time_left_us: int
) -> bytes:
    """All fields but the rows."""
    identity = encode_call_id(call_id)
    offsets, experts = rows.row_offsets.tobytes(), rows.expert_ids_N.tobytes()
    return b"".join(
        (
            _REQUEST_ID,
            _varint(len(identity)),
            identity,
            target.encoded,
            _REQUEST_OFFSETS,
            _varint(len(offsets)),
            offsets,
            _REQUEST_EXPERTS,
            _varint(len(experts)),
            experts,
            _REQUEST_GENERATED,
            _varint(rows.num_generated_rows),
            _REQUEST_TIME_LEFT,
            _varint(min(time_left_us, 2**32 - 1)),
        )
    )


@lru_cache(_CACHED_IDS)
def encode_call_id(call_id: CallId) -> bytes:
    """A serialized CallId."""
    parts = [_FIXED64.pack(_ID_GATEWAY, call_id.gateway)]
    for tag, value in zip(_ID_TAGS, call_id[1:], strict=True):
        parts += (tag, _varint(value))
    return b"".join(parts)


@lru_cache(_CACHED_SHAPES)
def _tensor_head(dtype: WireDtype, shape: tuple[int, ...], num_bytes: int) -> bytes:
    """A tensor up to its data."""
    extents = b"".join(map(_varint, shape))
    code = _varint(WIRE_CODES[dtype])
    return b"".join(
        (
            _TENSOR_DTYPE,
            code,
            _TENSOR_SHAPE,
            _varint(len(extents)),
            extents,
            _TENSOR_DATA,
            _varint(num_bytes),
        )
    )


def _scales_head(num_rows: int) -> bytes:
    return _TENSOR_SCALES + _varint(4 * num_rows)


def _long_varint(value: int) -> bytes:
    """An unsigned number in groups of 7 bits."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


_VARINTS = [_long_varint(value) for value in range(2**12)]


def _varint(value: int) -> bytes:
    return _VARINTS[value] if value < 2**12 else _long_varint(value)
