"""Seals: the same from numpy and from compiled code, and no flipped bit goes unnoticed."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from expertmesh.checksum import SEAL_BYTES, checksum, is_sealed, sealed
from expertmesh.model_config import DtypeName
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import NUMPY_DTYPES, WIRE_NUMPY, WireDtype
from expertmesh.wire_encode import (
    CallId,
    CallTarget,
    ReplyHead,
    RequestFrame,
    encode_call_id,
    encode_reply,
    join_message,
)
from expertmesh_kernels.cpu import checksum as compiled
from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.dispatch import WorkerRows

NUM_FLIPS = 100_000
CALL = CallId(gateway=2**63 + 5, epoch=3, step=70_000, layer=4, micro_batch=1)
MESSAGES = (
    *(("call", dtype) for dtype in ("float32", "bfloat16", "float16", "int8")),
    *(("reply", dtype) for dtype in ("float32", "bfloat16", "float16")),
)


def by_hand(body: bytes) -> int:
    """As the documentation has it."""
    filled = body + bytes(-len(body) % 4)
    words = np.frombuffer(filled, "<u4").tolist()
    return (len(body) + sum((2 * i + 3) * word for i, word in enumerate(words))) % 2**64


def by_compiled_code(body: bytes, pad: int = 0) -> int:
    """Of a body at any address."""
    buffer = np.frombuffer(b"\xff" * pad + body + b"\xff" * 8, np.uint8)
    return int(compiled.checksum(buffer.copy(), pad, pad + len(body))) % 2**64


def call(dtype: WireDtype, num_rows: int = 3, hidden_size: int = 40) -> bytes:
    """A real message."""
    rng = np.random.default_rng(num_rows)
    rows = WorkerRows(
        0, np.arange(num_rows), np.arange(0, 2 * num_rows + 1, 2, np.uint32),
        np.tile(np.array([1, 6], np.uint32), num_rows), np.zeros(0, np.int64), 1,
    )  # fmt: skip
    frame = RequestFrame(CALL, CallTarget(7, 9), rows, hidden_size, dtype, time_left_us=10**6)
    bits = rng.integers(0, 256, frame.rows_RH.nbytes, np.uint8)
    frame.rows_RH[:] = bits.view(WIRE_NUMPY[dtype]).reshape(frame.rows_RH.shape)
    frame.scales_R[:] = 0.01
    frame.finish()
    return frame.message


def reply(dtype: DtypeName, num_pairs: int = 6, hidden_size: int = 40) -> bytes:
    """A real message."""
    outputs = np.random.default_rng(num_pairs).standard_normal((num_pairs, hidden_size))
    head = ReplyHead(encode_call_id(CALL), 7, 120, 900, 4096)
    return join_message(encode_reply(head, outputs.astype(NUMPY_DTYPES[dtype]), dtype))


def message(kind: str, dtype: DtypeName) -> bytes:
    """A call or a reply."""
    return call(dtype) if kind == "call" else reply(dtype)


@njit
def num_unnoticed(buffer: NDArray[np.uint8], begin: int, end: int, bits: NDArray[np.int64]) -> int:
    """How many of these bits may be others in buffer[begin:end] so that it still looks sealed."""
    count = 0
    for bit in bits:
        at, mask = begin + bit // 8, np.uint8(1 << bit % 8)
        buffer[at] ^= mask
        count += compiled.is_sealed(buffer, begin, end)
        buffer[at] ^= mask
    return count


@given(st.binary(max_size=200), st.integers(0, 9), st.integers(0, 200))
def test_all_ways_are_one(body: bytes, pad: int, cut: int) -> None:
    """By hand, by numpy, in parts, and by compiled code at any address."""
    expected = by_hand(body)
    assert checksum(body) == expected
    assert checksum(body[:cut], memoryview(body)[cut:]) == expected
    assert checksum(body[: cut // 2], body[cut // 2 : cut], b"", body[cut:]) == expected
    assert by_compiled_code(body, pad) == expected


@pytest.mark.parametrize("size", [2**16 - 1, 2**16, 2**16 + 6, 3 * 2**16 + 1, 1_000_003])
def test_long_bodies(size: int) -> None:
    """They are more than one block, of the largest words."""
    body = b"\xff" * size
    assert checksum(body) == checksum(body[:70_001], body[70_001:]) == by_hand(body)
    assert by_compiled_code(body, 1) == by_hand(body)


@given(st.binary(max_size=200), st.integers(0, 9))
def test_seals_are_fields_of_messages(body: bytes, pad: int) -> None:
    """Both ways write the same, which a parser finds."""
    expected = sealed(body)
    buffer = np.zeros(pad + len(body) + SEAL_BYTES, np.uint8)
    buffer[pad : pad + len(body)] = np.frombuffer(body, np.uint8)
    assert compiled.put_seal(buffer, pad, pad + len(body)) == buffer.size
    assert buffer[pad:].tobytes() == expected
    assert compiled.is_sealed(buffer, pad, buffer.size)
    assert is_sealed(expected)
    seal = pb.ForwardResponse.FromString(expected[len(body) :])
    assert seal == pb.ForwardResponse(checksum=checksum(body))


@given(st.binary(max_size=40))
def test_what_has_no_seal(data: bytes) -> None:
    """Bytes at random, and fewer than a seal has."""
    assert not is_sealed(data)
    assert not compiled.is_sealed(np.frombuffer(data + b"\0", np.uint8).copy(), 0, len(data))


@pytest.mark.parametrize(("kind", "dtype"), MESSAGES)
def test_every_bit_counts(kind: str, dtype: DtypeName) -> None:
    """No bit of a message can be another, its seal included."""
    good = message(kind, dtype)
    buffer = np.frombuffer(good, np.uint8).copy()
    assert compiled.is_sealed(buffer, 0, buffer.size)
    assert num_unnoticed(buffer, 0, buffer.size, np.arange(8 * len(good))) == 0
    for bit in range(0, 8 * len(good), 7):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        assert not is_sealed(flipped)


@pytest.mark.parametrize(("kind", "dtype"), MESSAGES)
def test_two_bits_bursts_and_exchanges(kind: str, dtype: DtypeName) -> None:
    """Neither two flipped bits, nor other 32 bits in a row, nor two words in each other's place."""
    chance, good = random.Random(1), message(kind, dtype)
    number, size = int.from_bytes(good, "little"), len(good)
    body_size = size - SEAL_BYTES
    for _ in range(1000):
        one, other = chance.sample(range(8 * size), 2)
        assert not is_sealed((number ^ 1 << one ^ 1 << other).to_bytes(size, "little"))
        run = chance.getrandbits(32) | 1
        at = chance.randrange(8 * body_size - 32)
        assert not is_sealed((number ^ run << at).to_bytes(size, "little"))
        one, other = (4 * word for word in chance.sample(range(body_size // 4), 2))
        swapped = bytearray(good)
        swapped[one : one + 4], swapped[other : other + 4] = (
            good[other : other + 4],
            good[one : one + 4],
        )
        assert is_sealed(swapped) == (swapped == good)


@pytest.mark.parametrize("kind", ["call", "reply"])
def test_a_hundred_thousand_flips(kind: str) -> None:
    """Of messages as a step of 32 rows has them: none is taken."""
    good = call("bfloat16", 32, 576) if kind == "call" else reply("float32", 64, 576)
    buffer = np.frombuffer(good, np.uint8).copy()
    bits = np.random.default_rng(2).integers(0, 8 * len(good), NUM_FLIPS // 2)
    assert num_unnoticed(buffer, 0, buffer.size, bits) == 0
    assert compiled.is_sealed(buffer, 0, buffer.size)
