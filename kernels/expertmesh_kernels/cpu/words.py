"""Words of 64 bits that several threads use at a time, by address: atomic operations, and a lock.

All operations are sequentially consistent. Who owns the memory keeps it alive. A lock is one word
in memory that begins as 0; whoever waits for it sleeps in the kernel of the operating system, which
must be Linux (`HAS_FUTEX`).
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils

from expertmesh_kernels.cpu.jit import intrinsic, njit
from expertmesh_kernels.cpu.sockets import monotonic_ns

cgutils: Any = untyped_cgutils

_I64 = ir.IntType(64)
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)
_WAIT, _WAKE = 128, 129  # private to this process
_ORDER = "seq_cst"

HAS_FUTEX = sys.platform == "linux" and _FUTEX != 0
"""True if locks can be waited for."""


def _operation(num_arguments: int, emit: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of the address of a word, and numbers, that returns a number."""

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        word = builder.inttoptr(args[0], _I64.as_pointer())
        return emit(builder, word, *args[1:])

    signature = types.int64(*[types.int64] * (1 + num_arguments))
    typings: list[Callable[..., Any]] = [
        lambda _context, _word: (signature, codegen),
        lambda _context, _word, _a: (signature, codegen),
        lambda _context, _word, _a, _b: (signature, codegen),
    ]
    return intrinsic(typings[num_arguments])


def _emit_load(builder: ir.IRBuilder, word: Any) -> Any:
    return builder.load_atomic(word, _ORDER, 8)


def _emit_add(builder: ir.IRBuilder, word: Any, amount: Any) -> Any:
    return builder.atomic_rmw("add", word, amount, _ORDER)


def _emit_exchange(builder: ir.IRBuilder, word: Any, value: Any) -> Any:
    return builder.atomic_rmw("xchg", word, value, _ORDER)


def _emit_replace(builder: ir.IRBuilder, word: Any, expected: Any, value: Any) -> Any:
    result = builder.cmpxchg(word, expected, value, _ORDER, _ORDER)
    return builder.zext(builder.extract_value(result, 1), _I64)


def _futex(builder: ir.IRBuilder, word: Any, operation: int, value: Any, limit: Any) -> Any:
    kind = ir.FunctionType(_I64, [_I64], var_arg=True)
    syscall = cgutils.get_or_insert_function(builder.module, kind, "syscall")
    address = builder.ptrtoint(word, _I64)
    return builder.call(syscall, [_I64(_FUTEX), address, _I64(operation), value, limit])


def _emit_wait(builder: ir.IRBuilder, word: Any, seen: Any, timeout_ns: Any) -> Any:
    """Sleeps while the low half of the word is `seen`."""
    limit = cgutils.alloca_once(builder, _I64, size=2)  # seconds, nanoseconds
    for i, part in enumerate((builder.sdiv, builder.srem)):
        builder.store(part(timeout_ns, _I64(10**9)), builder.gep(limit, [_I64(i)]))
    return _futex(builder, word, _WAIT, seen, builder.ptrtoint(limit, _I64))


def _emit_wake(builder: ir.IRBuilder, word: Any, count: Any) -> Any:
    return _futex(builder, word, _WAKE, count, _I64(0))


load_word = cast(Callable[[int], int], _operation(0, _emit_load))
add_word = cast(Callable[[int, int], int], _operation(1, _emit_add))
"""The word before the addition."""
exchange_word = cast(Callable[[int, int], int], _operation(1, _emit_exchange))
"""The word before."""
_replace = cast(Callable[[int, int, int], int], _operation(2, _emit_replace))
_wait = cast(Callable[[int, int, int], int], _operation(2, _emit_wait))
_wake = cast(Callable[[int, int], int], _operation(1, _emit_wake))

FREE, TAKEN, AWAITED = 0, 1, 2
"""A lock: nobody has it, somebody has it, and others sleep until they get it."""


@njit
def try_take(lock: int) -> bool:
    """Takes a lock if it is free."""
    return _replace(lock, FREE, TAKEN) == 1


@njit
def take(lock: int, timeout_ns: int) -> bool:
    """Takes a lock, or returns False when time is over."""
    if try_take(lock):
        return True
    deadline_ns = monotonic_ns() + timeout_ns
    while exchange_word(lock, AWAITED) != FREE:
        left_ns = deadline_ns - monotonic_ns()
        if left_ns <= 0:
            return False
        _wait(lock, AWAITED, left_ns)
    return True


@njit
def give_back(lock: int) -> None:
    """Frees a lock, and wakes one who waits for it."""
    if exchange_word(lock, FREE) == AWAITED:
        _wake(lock, 1)


@njit
def get(word: int) -> int:
    """The word at an address, for Python."""
    return load_word(word)


@njit
def put(word: int, value: int) -> None:
    """Sets the word at an address, for Python."""
    exchange_word(word, value)


@njit
def add(word: int, amount: int) -> None:
    """Adds to the word at an address, for Python."""
    add_word(word, amount)
