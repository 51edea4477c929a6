"""The wire codec: numpy arrays to protobuf messages and back, with every field checked.

Identities, tensors and message parsing; `expertmesh.wire_forward` has the data plane's messages.
Nothing here opens a socket or knows torch. Arrays made from a message are read-only views of the
message's bytes; checks come before any allocation that a peer could choose the size of. bfloat16
has no numpy type: its bits travel as uint16.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from expertmesh.checksum import is_sealed
from expertmesh.errors import WireError
from expertmesh.model_config import DtypeName, ModelConfig
from expertmesh.v1 import expert_service_pb2 as pb

assert sys.byteorder == "little", "tensors travel little-endian and are not swapped"

RawArray = npt.NDArray[np.number]
"""Elements as they travel; bfloat16 as uint16."""

DTYPE_CODES: Mapping[DtypeName, pb.Dtype] = {
    "float32": pb.DTYPE_FLOAT32,
    "bfloat16": pb.DTYPE_BFLOAT16,
    "float16": pb.DTYPE_FLOAT16,
}
NUMPY_DTYPES: Mapping[DtypeName, np.dtype[np.number]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
}
WireDtype = Literal[DtypeName, "int8"]
"""How hidden states may travel; int8 with a scale per row."""

WIRE_CODES: Mapping[WireDtype, pb.Dtype] = {
    "float32": pb.DTYPE_FLOAT32,
    "bfloat16": pb.DTYPE_BFLOAT16,
    "float16": pb.DTYPE_FLOAT16,
    "int8": pb.DTYPE_INT8,
}
WIRE_NUMPY: Mapping[WireDtype, np.dtype[np.number]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
    "int8": np.dtype(np.int8),
}
_WIRE_NAMES: Mapping[int, WireDtype] = {code: name for name, code in WIRE_CODES.items()}


def wire_dtypes(dtype: DtypeName) -> tuple[WireDtype, ...]:
    """How hidden states of a model in `dtype` may travel: as they are, or in fewer bytes."""
    narrower: tuple[WireDtype, ...] = ("bfloat16",) if dtype == "float32" else ()
    return (dtype, *narrower, "int8")


_EXPONENT_BITS: Mapping[DtypeName, int] = {
    "float32": 0x7F80_0000,
    "bfloat16": 0x7F80,
    "float16": 0x7C00,
}

_MAX_MESSAGE_BYTES = 2**31 - 1  # gRPC's limits are signed 32-bit
_MESSAGE_OVERHEAD_BYTES = 64 * 1024  # ids, shapes, error texts
UINT32 = np.dtype("<u4")
SCALE = np.dtype("<f4")
_NO_SCALES = np.frombuffer(b"", dtype=SCALE)


def incarnation() -> int:
    """A new identity of one life of a process: 64 random bits, never 0."""
    return secrets.randbits(64) or 1


def fingerprint64(fingerprint: bytes) -> int:
    """First 8 bytes of a model fingerprint, as they travel in every call."""
    return int.from_bytes(fingerprint[:8], "little")


def max_message_bytes(config: ModelConfig, dtype: DtypeName, max_rows: int) -> int:
    """Largest request or reply of a call with `max_rows` rows; both ends limit messages to it."""
    pairs = max_rows * max(1, config.top_k)
    tensor = pairs * config.hidden_size * NUMPY_DTYPES[dtype].itemsize
    routing = UINT32.itemsize * (max_rows + 1 + pairs)
    return min(tensor + routing + _MESSAGE_OVERHEAD_BYTES, _MAX_MESSAGE_BYTES)


def invalid(message: str) -> WireError:
    """INVALID_ARGUMENT with a message that names field, value and expectation."""
    return WireError(pb.ForwardError.CODE_INVALID_ARGUMENT, message)


# --- tensors --------------------------------------------------------------------------------------


def encode_tensor(array: RawArray, dtype: DtypeName) -> pb.Tensor:
    """A tensor message.

    Args:
        array: C-contiguous; bfloat16 as uint16.
        dtype: What the elements are.
    """
    assert array.dtype == NUMPY_DTYPES[dtype], f"{array.dtype} does not hold {dtype}"
    return pb.Tensor(dtype=DTYPE_CODES[dtype], shape=array.shape, data=array.tobytes())


def decode_tensor(message: pb.Tensor, where: str) -> tuple[RawArray, WireDtype]:
    """A read-only view of a tensor message.

    Args:
        message: What came in.
        where: Name of the field, for error messages.

    Raises:
        WireError: INVALID_ARGUMENT for dtype, shape or length.
    """
    dtype = _WIRE_NAMES.get(message.dtype)
    if dtype is None:
        names = ", ".join(pb.Dtype.Name(code) for code in _WIRE_NAMES)
        raise invalid(f"{where}.dtype is {message.dtype}, expected one of {names}")
    shape = tuple(message.shape)
    num_scales = shape[0] * SCALE.itemsize if dtype == "int8" and shape else 0
    if len(message.row_scales) != num_scales:
        raise invalid(
            f"{where}.row_scales has {len(message.row_scales)} bytes, "
            f"expected {num_scales or 'none'} with {dtype}"
        )
    num_bytes = prod(shape) * WIRE_NUMPY[dtype].itemsize  # Python integers: cannot overflow
    data = message.data
    if len(data) != num_bytes:
        raise invalid(
            f"{where}.data has {len(data)} bytes, expected {num_bytes} for shape "
            f"{list(shape[:8])} of {dtype}"
        )
    array = np.frombuffer(data, dtype=WIRE_NUMPY[dtype])
    return array.reshape(shape), dtype


def decode_scales(message: pb.Tensor, where: str) -> npt.NDArray[np.float32]:
    """[R] scales of the rows of an int8 tensor, a read-only view; empty for other types.

    Raises:
        WireError: INVALID_ARGUMENT for a scale that is negative, NaN or infinite.
    """
    if not message.row_scales:
        return _NO_SCALES
    scales_R = np.frombuffer(message.row_scales, dtype=SCALE)
    wrong = np.flatnonzero(~((scales_R >= 0) & (scales_R < np.inf)))
    if wrong.size:
        row = int(wrong[0])
        raise invalid(
            f"{where}.row_scales has {scales_R[row]} at row {row}, expected finite numbers from 0"
        )
    return scales_R


def all_finite(array: RawArray, dtype: DtypeName) -> bool:
    """True if no element is NaN or infinite. Exact, two passes over the bits."""
    if not array.size:
        return True
    bits, exponent = _bits(array, dtype)
    sign_free = bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)
    return bool((bits & sign_free).max() < exponent)


def finite_rows(array_RH: RawArray, dtype: DtypeName) -> npt.NDArray[np.bool_]:
    """[R] True where all elements of the row are finite."""
    bits, exponent = _bits(array_RH, dtype)
    finite: npt.NDArray[np.bool_] = ((bits & exponent) != exponent).all(axis=1)
    return finite


def _bits(
    array: RawArray, dtype: DtypeName
) -> tuple[npt.NDArray[np.unsignedinteger], np.unsignedinteger]:
    """The bits of the elements, and those of the exponent: all set in NaN and infinity."""
    kind = np.uint32 if dtype == "float32" else np.uint16
    return array.view(kind), kind(_EXPONENT_BITS[dtype])


# --- bytes ----------------------------------------------------------------------------------------

M = TypeVar("M", bound=Message)


def _always() -> bool:
    return True


@dataclass(frozen=True)
class Received(Generic[M]):
    """Bytes that came in, parsed if they could be."""

    message: M | None
    received_s: float
    """time.monotonic() when they came."""
    error: str = ""
    """Why there is no message, or what is wrong with its bytes."""
    is_intact: bool = True
    """False if bytes were changed on the way: what was parsed may be anything."""
    is_wanted: Callable[[], bool] = _always
    """False once its sender is gone, so that nobody would get an answer."""


def receiver(kind: type[M]) -> Callable[[bytes], Received[M]]:
    """A deserializer that does not raise: a failing one would end the stream with UNKNOWN."""

    def parse(data: bytes) -> Received[M]:
        received_s = time.monotonic()
        try:
            return Received(kind.FromString(data), received_s)
        except DecodeError as error:
            reason = f"{len(data)} bytes are not a {kind.DESCRIPTOR.name}: {error}"
            return Received(None, received_s, reason)

    return parse


def sealed_receiver(kind: type[M]) -> Callable[[bytes], Received[M]]:
    """The same for messages with a seal; see `expertmesh.checksum`."""
    parse = receiver(kind)

    def check(data: bytes) -> Received[M]:
        received = parse(data)
        if is_sealed(data):
            return received
        error = f"a {kind.DESCRIPTOR.name} of {len(data)} bytes does not match its checksum"
        return replace(received, error=error, is_intact=False)

    return check
