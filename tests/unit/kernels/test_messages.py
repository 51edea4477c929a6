"""Messages read and written by compiled code are those of the generated classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire_encode import CallId, encode_call_id
from expertmesh_kernels.cpu import messages as m

UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
BYTES = st.binary(max_size=300)
KINDS: dict[type[Message], NDArray[np.int64]] = {
    pb.CallId: m.CALL_ID_KINDS,
    pb.ForwardRequest: m.REQUEST_KINDS,
    pb.ForwardResponse: m.RESPONSE_KINDS,
    pb.Tensor: m.TENSOR_KINDS,
}
WIRE_TYPES = {
    FieldDescriptor.TYPE_MESSAGE: m.LEN,
    FieldDescriptor.TYPE_BYTES: m.LEN,
    FieldDescriptor.TYPE_FIXED64: m.FIXED64,
}
Found = dict[int, int | bytes]

tensors = st.builds(
    pb.Tensor,
    dtype=st.sampled_from([0, 1, 2, 3, 4]),
    shape=st.lists(UINT32, max_size=3),
    data=BYTES,
    row_scales=BYTES,
)
call_ids = st.builds(
    pb.CallId,
    gateway=UINT64,
    epoch=UINT64,
    step=UINT64,
    layer=UINT32,
    micro_batch=UINT32,
    attempt=UINT32,
)
requests = st.builds(
    pb.ForwardRequest,
    id=st.none() | call_ids,
    incarnation=UINT64,
    model_fingerprint=UINT64,
    hidden_states=st.none() | tensors,
    row_offsets=BYTES,
    expert_ids=BYTES,
    num_generated_rows=UINT32,
    time_left_us=UINT32,
    checksum=UINT64,
)
responses = st.builds(
    pb.ForwardResponse,
    id=st.none() | call_ids,
    incarnation=UINT64,
    outputs=st.none() | tensors,
    queue_us=UINT32,
    compute_us=UINT32,
    row_credits=UINT32,
    checksum=UINT64,
)
any_message = st.one_of(tensors, call_ids, requests, responses)


def scanned(data: bytes, kinds: NDArray[np.int64], pad: int = 0) -> Found | None:
    """What `scan` finds in a message with other bytes around it; None if it takes it not."""
    buffer = np.frombuffer(b"\x0a" * pad + data + b"\x0a\x01\x00", np.uint8).copy()
    values, lengths = np.full((2, m.NUM_FIELDS), 77, np.int64)
    if not m.scan(buffer, pad, pad + len(data), kinds, values, lengths):
        return None
    found: Found = {}
    for field, kind in enumerate(kinds):
        if lengths[field] == m.ABSENT:
            continue
        number, length = int(values[field]), int(lengths[field])
        found[field] = bytes(buffer[number : number + length]) if kind == m.LEN else number % 2**64
    return found


def written(message: Message) -> Found:
    """The same of a message as the generated class has it."""
    found: Found = {}
    for field, value in message.ListFields():
        found[field.number] = _raw(field.name, value)
    return found


def _raw(name: str, value: int | bytes | Message | Sequence[int]) -> int | bytes:
    if isinstance(value, Message):
        return value.SerializeToString()
    if name == "shape":
        assert not isinstance(value, int)
        return pb.Tensor(shape=value).SerializeToString()[2:]
    assert isinstance(value, int | bytes)
    return value if isinstance(value, bytes) else int(value)


def test_numbers_of_fields() -> None:
    """They are those of the protos, with the wire types that fields have there."""
    for kind, table in KINDS.items():
        fields = kind.DESCRIPTOR.fields
        expected = {
            field.number: m.LEN if field.is_repeated else WIRE_TYPES.get(field.type, m.VARINT)
            for field in fields
        }
        assert {n: k for n, k in enumerate(table) if k != m._NO_FIELD} == expected
        prefix = {pb.CallId: "CALL_ID", pb.Tensor: "TENSOR"}.get(
            kind, kind.DESCRIPTOR.name.removeprefix("Forward").upper()
        )
        for field in fields:
            assert getattr(m, f"{prefix}_{field.name.upper()}") == field.number


@given(any_message, st.sampled_from([0, 1, 9]))
def test_messages_are_read(message: Message, pad: int) -> None:
    """Whatever the generated classes write, wherever it lies."""
    data = message.SerializeToString()
    assert scanned(data, KINDS[type(message)], pad) == written(message)


@given(any_message, st.data())
def test_nothing_wrong_is_taken(message: Message, data: st.DataObject) -> None:
    """Bytes that were changed, cut or added: what is taken is what a parser finds."""
    raw = bytearray(message.SerializeToString())
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(raw)))
        replaced = data.draw(st.integers(0, 2))
        raw[at : at + replaced] = data.draw(st.binary(max_size=3))
    found = scanned(bytes(raw), KINDS[type(message)])
    if found is None:
        return
    try:
        parsed = type(message).FromString(bytes(raw))
    except DecodeError:
        return  # what is inside a nested message is not looked at yet
    for number, value in written(parsed).items():
        field = type(message).DESCRIPTOR.fields_by_number[number]
        if field.type in (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_UINT32):
            continue  # the rest of it, and larger numbers, are for who uses them
        assert found[number] == value


def test_cut_anywhere() -> None:
    """A message that ends too early is no message, or one of fewer fields."""
    message = pb.CallId(gateway=2**63 + 5, epoch=2**40, step=300, layer=7, attempt=2)
    data = message.SerializeToString()
    taken = [length for length in range(len(data) + 1) if scanned(data[:length], m.CALL_ID_KINDS)]
    assert taken == [9, 16, 19, 21, 23]


def test_what_is_left_to_parsers() -> None:
    """Unknown fields, wrong wire types, fields that come twice, numbers of more than 64 bits."""
    refused = {
        b"\x38\x01": "field 7",
        b"\x09\x01": "gateway cut",
        b"\x08\x01": "gateway as a varint",
        b"\x10\x01\x10\x01": "epoch twice",
        b"\x10" + b"\xff" * 9 + b"\x02": "65 bits",
        b"\x10" + b"\x80" * 10 + b"\x00": "11 bytes",
        b"\x82\x01\x00": "field 16",
        b"\x00": "field 0",
        b"\x13\x14": "a group",
    }
    for data, why in refused.items():
        assert scanned(data, m.CALL_ID_KINDS) is None, why
    assert scanned(b"\x10" + b"\xff" * 9 + b"\x01", m.CALL_ID_KINDS) == {2: 2**64 - 1}
    assert scanned(b"\x1a\x05abcd", m.TENSOR_KINDS) is None
    assert scanned(b"\x1a" + b"\xff" * 9 + b"\x01", m.TENSOR_KINDS) is None


@given(st.builds(CallId, UINT64, UINT64, UINT64, UINT32, UINT32, UINT32))
def test_fields_are_written(call_id: CallId) -> None:
    """As `wire_encode` writes them."""
    numbers = np.array(call_id, np.uint64).view(np.int64)
    buffer = np.zeros(80, np.uint8)
    at = m.put_fixed64(buffer, 1, m.CALL_ID_GATEWAY, numbers[0])
    for field in range(m.CALL_ID_EPOCH, m.CALL_ID_ATTEMPT + 1):
        start = at
        at = m.put_number(buffer, at, field, numbers[field - 1])
        assert at - start == 1 + m.varint_size(numbers[field - 1])
    assert bytes(buffer[1:at]) == encode_call_id(call_id)
    assert not buffer[at:].any()


@given(st.integers(1, 40))
def test_tensors_are_written(count: int) -> None:
    """Bytes behind their length."""
    buffer = np.zeros(80, np.uint8)
    at = m.put_length(buffer, 0, m.TENSOR_DATA, count)
    assert bytes(buffer[: at + count]) == pb.Tensor(data=bytes(count)).SerializeToString()


@pytest.mark.parametrize("field", range(m.NUM_FIELDS))
def test_wire_types_that_do_not_exist_are_malformed(field: int) -> None:
    """Whether or not the message has such a field."""
    for kinds in KINDS.values():
        for wire_type in (3, 4, 6, 7):
            assert scanned(bytes((field << 3 | wire_type, 0)), kinds) is None
