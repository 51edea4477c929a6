"""Messages written byte by byte are those that the generated classes write and read."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertmesh import wire
from expertmesh.checksum import SEAL_BYTES, checksum, is_sealed
from expertmesh.direct import (
    BUFFER_SIZE,
    BUFFER_USED,
    DirectConnectionError,
    FrameReader,
    read_offer,
    send_parts,
)
from expertmesh.model_config import DtypeName
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import WireDtype
from expertmesh.wire_encode import (
    LENGTH,
    CallId,
    CallTarget,
    ReplyHead,
    RequestFrame,
    encode_call_id,
    encode_reply,
    frame_of,
    join_message,
)

UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
SIZES = st.sampled_from([0, 1, 2, 7, 40, 200])


@dataclass(frozen=True)
class Rows:
    """Routing part of a call."""

    row_offsets: npt.NDArray[np.uint32]
    expert_ids_N: npt.NDArray[np.uint32]
    num_generated_rows: int


def filled(shape: tuple[int, int], dtype: WireDtype) -> wire.RawArray:
    bits = np.random.default_rng(1).integers(0, 200, shape)
    return (bits % 127).astype(wire.WIRE_NUMPY[dtype])


@given(
    st.builds(CallId, UINT64, UINT64, UINT64, UINT32, UINT32, UINT32),
    UINT64,
    UINT64,
    SIZES,
    st.sampled_from([1, 3, 48, 576]),
    st.sampled_from(["float32", "bfloat16", "float16", "int8"]),
    UINT32,
    st.integers(0, 2**40),
)
def test_request_is_what_the_generated_class_says(
    call_id: CallId,
    incarnation: int,
    fingerprint: int,
    num_rows: int,
    hidden_size: int,
    dtype: WireDtype,
    generated: int,
    time_left_us: int,
) -> None:
    """Field by field, for any values; with the length of the message in front."""
    rows = Rows(
        np.arange(0, 2 * num_rows + 1, 2, np.uint32),
        np.arange(2 * num_rows, dtype=np.uint32),
        generated,
    )
    frame = RequestFrame(
        call_id, CallTarget(incarnation, fingerprint), rows, hidden_size, dtype,
        time_left_us=time_left_us,
    )  # fmt: skip
    assert frame.rows_RH.flags.aligned
    frame.rows_RH[:] = filled((num_rows, hidden_size), dtype)
    frame.scales_R[:] = 0.5
    frame.finish()
    data = frame.rows_RH.tobytes()
    expected = pb.ForwardRequest(
        id=pb.CallId(**call_id._asdict()),
        incarnation=incarnation,
        model_fingerprint=fingerprint,
        hidden_states=pb.Tensor(
            dtype=wire.WIRE_CODES[dtype],
            shape=[num_rows, hidden_size],
            data=data,
            row_scales=np.full(num_rows, 0.5, "<f4").tobytes() if dtype == "int8" else b"",
        ),
        row_offsets=rows.row_offsets.tobytes(),
        expert_ids=rows.expert_ids_N.tobytes(),
        num_generated_rows=generated,
        time_left_us=min(time_left_us, 2**32 - 1),
    )
    assert is_sealed(frame.message)
    expected.checksum = checksum(frame.message[:-SEAL_BYTES])
    assert pb.ForwardRequest.FromString(frame.message) == expected
    assert (len(frame.message),) == LENGTH.unpack(frame.framed[: LENGTH.size])
    assert bytes(frame.framed[LENGTH.size :]) == frame.message
    assert frame.num_payload_bytes == len(data)


@given(
    st.builds(CallId, UINT64, UINT64, UINT64, UINT32, UINT32, UINT32),
    UINT64,
    UINT32,
    SIZES,
    st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_reply_is_what_the_generated_class_says(
    call_id: CallId, incarnation: int, number: int, num_pairs: int, dtype: DtypeName
) -> None:
    """Field by field, for any values."""
    outputs = filled((num_pairs, 48), dtype)
    head = ReplyHead(encode_call_id(call_id), incarnation, number, number // 2, number // 3)
    parts = encode_reply(head, outputs, dtype)
    data = outputs.tobytes()
    expected = pb.ForwardResponse(
        id=pb.CallId(**call_id._asdict()),
        incarnation=incarnation,
        outputs=pb.Tensor(
            dtype=wire.DTYPE_CODES[dtype],
            shape=[num_pairs, 48],
            data=data,
        ),
        queue_us=number,
        compute_us=number // 2,
        row_credits=number // 3,
    )
    message = join_message(parts)
    assert is_sealed(message)
    expected.checksum = checksum(message[:-SEAL_BYTES])
    assert pb.ForwardResponse.FromString(message) == expected
    assert b"".join(parts) == LENGTH.pack(len(message)) + message
    assert CallId.of(expected.id) == call_id


def test_frames_arrive_however_they_are_cut() -> None:
    """Messages of any length come out whole and in order, in whatever pieces bytes come in."""
    rng = np.random.default_rng(5)
    lengths = (0, 1, 5, 300_000, 7, 600_000, 0, 2)
    messages = [rng.integers(0, 256, length, np.uint8).tobytes() for length in lengths]
    stream = b"".join(b"".join(frame_of(message)) for message in messages)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = FrameReader(ours, max(lengths))
        found: list[bytes] = []
        at = 0
        while at < len(stream):
            size = int(rng.integers(1, 5)) if at < 40 else int(rng.integers(1, 70_000))
            theirs.sendall(stream[at : at + size])
            at += size
            found += reader.receive()
        ours.setblocking(False)
        while len(found) < len(messages):
            found += reader.receive()
        assert found == messages


def test_frames_that_compiled_code_left() -> None:
    """They are handed out without a read; one that the buffer cannot hold is read in a larger."""
    ours, theirs = socket.socketpair()
    long = bytes(range(256)) * 2**11
    stream = b"".join(b"".join(frame_of(message)) for message in (b"one", b"two", long))
    with ours, theirs:
        ours.setblocking(False)
        reader = FrameReader(ours, len(long))
        size = int(reader.words[BUFFER_SIZE])
        reader._view[:size] = stream[:size]
        reader.words[BUFFER_USED] = size
        assert reader.receive() == [b"one", b"two"]
        theirs.setblocking(False)
        found: list[bytes] = []
        sent = size
        while not found:
            sent += theirs.send(stream[sent:])
            found += reader.receive()
        assert found == [long]
        assert reader.words[BUFFER_SIZE] > size
        assert reader.words[BUFFER_USED] == 0


def test_frames_that_are_too_long_or_end() -> None:
    """An announced length above the limit, and the end of the connection, are errors at once."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(LENGTH.pack(101))
        with pytest.raises(DirectConnectionError, match="101 bytes, expected at most 100"):
            FrameReader(ours, 100).receive()
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(DirectConnectionError, match="closed"):
            FrameReader(ours, 100).receive()


def test_parts_are_sent_whole() -> None:
    """A frame in parts that the socket takes piece by piece arrives as one."""
    ours, theirs = socket.socketpair()
    parts: list[bytes | memoryview] = [b"head", memoryview(bytes(2**20)), b"", b"tail"]
    expected = b"".join(parts)
    with ours, theirs:
        sender = threading.Thread(target=send_parts, args=(ours, parts), name="test-sender")
        sender.start()
        assert theirs.recv(len(expected), socket.MSG_WAITALL) == expected
        sender.join(10)


@pytest.mark.parametrize(
    "value", ["", "5", "70000 " + "00" * 16, "0 " + "00" * 16, "80 xy", "80 00"]
)
def test_wrong_offers_are_refused(value: str) -> None:
    """What a peer offers is checked."""
    with pytest.raises(DirectConnectionError, match="expertmesh-direct is"):
        read_offer(value)
    assert read_offer("80 " + "ab" * 16) == (80, b"\xab" * 16)
