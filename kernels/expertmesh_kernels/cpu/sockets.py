"""Sockets and the clock, called by compiled code: the C library's functions by their names.

What fails returns -errno; a call that a signal interrupted is made again. Who calls one of these
from compiled code that Python called holds no GIL.
"""

from __future__ import annotations

import errno
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import intrinsic, njit

cgutils: Any = untyped_cgutils

_I64 = ir.IntType(64)
_I32 = ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()
_ERRNO = "__error" if sys.platform == "darwin" else "__errno_location"
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
_EINTR = errno.EINTR
_CLOCK = getattr(time, "CLOCK_MONOTONIC", 1)
_NS_PER_MS = 1_000_000


def _call(builder: ir.IRBuilder, name: str, result: Any, values: list[Any]) -> Any:
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def _result(builder: ir.IRBuilder, value: Any) -> Any:
    """What a function returned, or -errno; as 64 bits."""
    where = _call(builder, _ERRNO, _I32.as_pointer(), [])
    error = builder.neg(builder.sext(builder.load(where), _I64))
    wide = value if value.type == _I64 else builder.sext(value, _I64)
    return builder.select(builder.icmp_signed("<", wide, _I64(0)), error, wide)


def _transfer(name: str) -> Callable[..., Any]:
    """The typing function of recv or send: (fd, address, count)."""

    def typing(_context: Any, _fd: Any, _address: Any, _count: Any) -> Any:
        def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
            fd, address = builder.trunc(args[0], _I32), builder.inttoptr(args[1], _BYTES)
            return _result(
                builder, _call(builder, name, _I64, [fd, address, args[2], _I32(_NO_SIGNAL)])
            )

        return types.int64(types.int64, types.int64, types.int64), codegen

    return typing


def _poll_typing(_context: Any, _address: Any, _count: Any, _timeout_ms: Any) -> Any:
    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        address, timeout_ms = builder.inttoptr(args[0], _BYTES), builder.trunc(args[2], _I32)
        return _result(builder, _call(builder, "poll", _I32, [address, args[1], timeout_ms]))

    return types.int64(types.int64, types.int64, types.int64), codegen


def _clock_typing(_context: Any) -> Any:
    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, _args: Any) -> Any:
        now = cgutils.alloca_once(builder, _I64, size=2)  # seconds, nanoseconds
        _call(builder, "clock_gettime", _I32, [_I32(_CLOCK), builder.bitcast(now, _BYTES)])
        seconds, rest = (builder.load(builder.gep(now, [_I32(i)])) for i in range(2))
        return builder.add(builder.mul(seconds, _I64(10**9)), rest)

    return types.int64(), codegen


_recv = cast(Callable[[int, int, int], int], intrinsic(_transfer("recv")))
_send = cast(Callable[[int, int, int], int], intrinsic(_transfer("send")))
_poll = cast(Callable[[int, int, int], int], intrinsic(_poll_typing))
monotonic_ns = cast(Callable[[], int], intrinsic(_clock_typing))
"""The clock of `time.monotonic`, in nanoseconds."""


@njit
def receive(fd: int, array: NDArray[np.uint8], at: int, count: int) -> int:
    """Fills array[at : at + count] with what there is to read, at least a byte if `fd` blocks.

    Returns how many bytes, 0 at the end of the connection, -errno for an error (EAGAIN: nothing to
    read).
    """
    result = -_EINTR
    while result == -_EINTR:
        result = _recv(fd, array.ctypes.data + at, count)
    return result


@njit
def send(fd: int, array: NDArray[np.uint8], at: int, count: int) -> int:
    """Sends from array[at : at + count]; how many bytes were taken, or -errno.

    A blocking socket may take fewer when its time limit is over, one that does not block any time.
    """
    result = -_EINTR
    while result == -_EINTR:
        result = _send(fd, array.ctypes.data + at, count)
    return result


@njit
def poll(
    fds: NDArray[np.int64],
    events: NDArray[np.int64],
    revents: NDArray[np.int64],
    timeout_ms: int,
) -> int:
    """Waits until something happens to one of some descriptors.

    Args:
        fds: Descriptors; negative ones are left out.
        events: What to wait for with each, such as `select.POLLIN`.
        revents: Takes what happened to each.
        timeout_ms: Longest wait; negative waits for ever, 0 does not wait.

    Returns to how many something happened, 0 when time is over, -errno for an error.
    """
    count = fds.size
    entries = np.empty(count, np.int64)  # struct pollfd: int fd; short events, revents
    for i in range(count):
        entries[i] = (fds[i] & 0xFFFF_FFFF) | (events[i] & 0xFFFF) << 32
    deadline_ns = monotonic_ns() + timeout_ms * _NS_PER_MS
    left_ms = timeout_ms
    result = _poll(entries.ctypes.data, count, left_ms)
    while result == -_EINTR:
        if timeout_ms > 0:
            left_ms = max(0, -(-(deadline_ns - monotonic_ns()) // _NS_PER_MS))
        result = _poll(entries.ctypes.data, count, left_ms)
    for i in range(count):
        revents[i] = entries[i] >> 48 & 0xFFFF
    return result
