"""Seals of messages, written and checked in compiled code; see `expertmesh.checksum`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types as untyped_types
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import intrinsic, njit
from expertmesh_kernels.cpu.memory import address_of
from expertmesh_kernels.cpu.messages import FIXED64, SEAL, get_fixed, put_fixed64

types: Any = untyped_types

SEAL_BYTES = 9
_TAG = SEAL << 3 | FIXED64
_WORD_BYTES, _PAIR_BYTES = 4, 8
_FIRST_WEIGHT = 3


def _load_typing(_context: Any, _address: Any) -> Any:
    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()), align=1)

    return types.uint64(types.int64), codegen


_load = cast(Callable[[int], np.uint64], intrinsic(_load_typing))
"""Eight bytes at an address, which need not be aligned."""


@njit
def _pairs(address: int, size: int) -> np.int64:
    """The size, and what whole pairs of words add.

    Weights have 32 bits, so that products take one instruction each.
    """
    total = np.uint64(size)
    low = np.uint64(0xFFFF_FFFF)
    num_pairs = size // _PAIR_BYTES
    for i in range(num_pairs):
        pair = _load(address + _PAIR_BYTES * i)
        weight, next_weight = np.uint32(4 * i + _FIRST_WEIGHT), np.uint32(4 * i + _FIRST_WEIGHT + 2)
        total += np.uint64(weight) * (pair & low)
        total += np.uint64(next_weight) * (pair >> np.uint64(32))
    return np.int64(total)


@njit
def _rest(buffer: NDArray[np.uint8], begin: int, end: int) -> np.int64:
    """What bytes behind the last pair of words add."""
    total = np.int64(0)
    size = end - begin
    for i in range(size - size % _PAIR_BYTES, size):
        weight = np.int64(2 * (i // _WORD_BYTES) + _FIRST_WEIGHT)
        total += weight * (np.int64(buffer[begin + i]) << (8 * (i % _WORD_BYTES)))
    return total


@njit
def checksum(buffer: NDArray[np.uint8], begin: int, end: int) -> np.int64:
    """Of the body buffer[begin:end], as the int64 of the same bits."""
    return _pairs(address_of(buffer) + begin, end - begin) + _rest(buffer, begin, end)


@njit
def put_seal(buffer: NDArray[np.uint8], begin: int, end: int) -> int:
    """Seals the body buffer[begin:end]; where the message ends."""
    return put_fixed64(buffer, end, SEAL, int(checksum(buffer, begin, end)))


@njit
def is_sealed(buffer: NDArray[np.uint8], begin: int, end: int) -> bool:
    """Whether the message buffer[begin:end] is as it was when it was sealed."""
    at = end - SEAL_BYTES
    if at < begin or buffer[at] != _TAG:
        return False
    return bool(get_fixed(buffer, at + 1, 8) == checksum(buffer, begin, at))
