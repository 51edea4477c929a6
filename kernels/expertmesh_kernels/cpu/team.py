"""One team of threads a process, inside compiled code: fork, share out chunks, join.

A kernel that is worth more than one core hands `parallel_for` an ordinary compiled function and a
number of chunks. The calling thread takes chunks like any helper, so it never waits for a thread
that still sleeps: a helper that comes late finds less to do, one that does not come at all costs
nothing. Which thread computes a chunk cannot change a bit, since a chunk writes its own outputs.

Threads: `kernel-team-N`, started by `start_team`, ended by `stop_team` or with the process; they
hold no GIL. One fork at a time: a second caller meanwhile computes its chunks alone.

    owner                                   helper
    describe the fork; NEXT = 0             wait until GENERATION changes: spin, then futex
    OPEN = 1; GENERATION += 1; wake         ACTIVE += 1
    take chunks until none is left          if OPEN: take chunks until none is left
    OPEN = 0; wait until ACTIVE == 0        ACTIVE -= 1

A helper that raises ACTIVE after the owner saw 0 finds OPEN = 0, or a fork described as a whole.
"""

from __future__ import annotations

import atexit
import platform
import sys
import threading
from collections.abc import Callable
from typing import Any, cast

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils

from expertmesh_kernels.cpu.jit import intrinsic, njit

cgutils: Any = untyped_cgutils

_I64 = ir.IntType(64)
_I32 = ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()
_ENTRY = ir.FunctionType(ir.VoidType(), [_BYTES, _I64])

_WORDS = 64
_SYMBOL = "expertmesh_kernel_team"
# Words of the shared state; those that different threads write are on different cache lines.
_GENERATION, _NEXT, _ACTIVE, _SLEEPING, _BUSY = 0, 8, 16, 24, 32
_OPEN, _FUNCTION, _ENVIRONMENT, _COUNT, _STOP, _HELPERS = 40, 41, 42, 43, 44, 45

_SPINS = 300
"""Times a helper looks and yields before it sleeps: some 200 us, more than Python needs between two
ops. A core that another process can use is left to it at once."""
_PAUSES = 8
"""Of the core between two looks."""
_FUTEX_NUMBER, _YIELD_NUMBER = {"x86_64": (202, 24), "aarch64": (98, 124)}.get(
    platform.machine(), (0, 0)
)
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129  # private to this process

_memory = np.zeros(_WORDS + 8, np.int64)
_first = (-_memory.ctypes.data % 64) // 8  # a cache line's start
_state = _memory[_first : _first + _WORDS]
llvm.add_symbol(_SYMBOL, _state.ctypes.data)  # compiled code, cached too, finds it by its name


# --- words of the state, in compiled code ---


def _word(builder: ir.IRBuilder, index: int) -> Any:
    """Address of a word of the state."""
    kind = ir.ArrayType(_I64, _WORDS)
    module = builder.module
    state = module.globals.get(_SYMBOL) or ir.GlobalVariable(module, kind, _SYMBOL)
    state.linkage = "external"
    return builder.gep(state, [_I64(0), _I64(index)], inbounds=True)


def _load(builder: ir.IRBuilder, index: int) -> Any:
    return builder.load_atomic(_word(builder, index), "seq_cst", 8)


def _store(builder: ir.IRBuilder, index: int, value: Any) -> None:
    builder.store_atomic(value, _word(builder, index), "seq_cst", 8)


def _add(builder: ir.IRBuilder, index: int, amount: int) -> Any:
    """The word before the addition."""
    return builder.atomic_rmw("add", _word(builder, index), _I64(amount), "seq_cst")


def _pause(builder: ir.IRBuilder) -> None:
    if platform.machine() == "x86_64":
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(
            cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), []
        )


def _syscall(builder: ir.IRBuilder, numbers: list[Any]) -> None:
    kind = ir.FunctionType(_I64, [_I64], var_arg=True)
    syscall = cgutils.get_or_insert_function(builder.module, kind, "syscall")
    builder.call(syscall, numbers)


def _relax(builder: ir.IRBuilder) -> None:
    """Wait a little; whoever else can use the core gets it."""
    for _ in range(_PAUSES):
        _pause(builder)
    _syscall(builder, [_I64(_YIELD_NUMBER)])


def _futex(builder: ir.IRBuilder, operation: int, value: Any) -> None:
    """futex(&GENERATION, operation, value) without a time limit."""
    address = builder.ptrtoint(_word(builder, _GENERATION), _I64)
    unused = [_I64(0)] * 3
    _syscall(builder, [_I64(_FUTEX_NUMBER), address, _I64(operation), value, *unused])


def _take_chunks(builder: ir.IRBuilder, entry: Any, environment: Any, count: Any) -> None:
    """entry(environment, chunk) for each chunk that this thread gets."""
    loop = builder.append_basic_block("take")
    body = builder.append_basic_block("chunk")
    end = builder.append_basic_block("taken")
    builder.branch(loop)
    builder.position_at_end(loop)
    chunk = _add(builder, _NEXT, 1)
    builder.cbranch(builder.icmp_signed("<", chunk, count), body, end)
    builder.position_at_end(body)
    builder.call(entry, [environment, chunk])
    builder.branch(loop)
    builder.position_at_end(end)


# --- the owner's side ---


def _fork_typing(typing_context: Any, kernel: Any, arguments: Any, count: Any) -> Any:
    kernel_signature = kernel.get_call_type(typing_context, (*arguments.types, types.intp), {})

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        entry = _entry_of(context, builder, kernel, kernel_signature, signature.args[1])
        environment = cgutils.alloca_once_value(builder, values[1])
        environment = builder.bitcast(environment, _BYTES)
        _emit_fork(builder, entry, environment, values[2])
        return context.get_dummy_value()

    return types.void(kernel, arguments, types.intp), codegen


def _entry_of(
    context: Any, builder: ir.IRBuilder, kernel: Any, kernel_signature: Any, arguments: Any
) -> Any:
    """A function (address of the arguments, chunk) that calls the kernel.

    A kernel that raises would do so unnoticed: kernels check nothing and raise nothing.
    """
    compiled = kernel.dispatcher.overloads[kernel_signature.args]
    context.add_linking_libs((compiled.library,))
    callee = context.declare_function(builder.module, compiled.fndesc)
    name = f"{builder.function.name}.{len(builder.module.functions)}.chunk"
    entry = ir.Function(builder.module, _ENTRY, name)
    entry.linkage = "internal"
    inner = ir.IRBuilder(entry.append_basic_block())
    environment = inner.bitcast(entry.args[0], context.get_value_type(arguments).as_pointer())
    values = inner.load(environment)
    parts = [
        _uncounted(inner, kind, inner.extract_value(values, i))
        for i, kind in enumerate(arguments.types)
    ]
    context.call_conv.call_function(
        inner, callee, kernel_signature.return_type, kernel_signature.args, [*parts, entry.args[1]]
    )
    inner.ret_void()
    return entry


def _uncounted(builder: ir.IRBuilder, kind: Any, value: Any) -> Any:
    """An argument whose arrays nobody counts references to: the owner has them until the join.

    Counting takes locked instructions, on words that all threads share.
    """
    if isinstance(kind, types.Array):
        nobody = ir.Constant(value.type.elements[0], None)
        return builder.insert_value(builder.insert_value(value, nobody, 0), nobody, 1)
    parts = getattr(kind, "types", ()) if isinstance(kind, types.BaseTuple) else ()
    for i, part in enumerate(parts):
        inner = _uncounted(builder, part, builder.extract_value(value, i))
        value = builder.insert_value(value, inner, i)
    return value


def _emit_fork(builder: ir.IRBuilder, entry: Any, environment: Any, count: Any) -> None:
    is_worth = builder.and_(
        builder.icmp_signed(">", count, _I64(1)),
        builder.icmp_signed(">", builder.load(_word(builder, _HELPERS)), _I64(0)),
    )
    alone = builder.append_basic_block("alone")
    asking = builder.append_basic_block("asking")
    together = builder.append_basic_block("together")
    end = builder.append_basic_block("joined")
    builder.cbranch(is_worth, asking, alone)
    builder.position_at_end(asking)
    claim = builder.cmpxchg(_word(builder, _BUSY), _I64(0), _I64(1), "seq_cst", "seq_cst")
    builder.cbranch(builder.extract_value(claim, 1), together, alone)
    builder.position_at_end(alone)
    with cgutils.for_range(builder, count) as loop:
        builder.call(entry, [environment, loop.index])
    builder.branch(end)
    builder.position_at_end(together)
    _emit_together(builder, entry, environment, count)
    builder.branch(end)
    builder.position_at_end(end)


def _emit_together(builder: ir.IRBuilder, entry: Any, environment: Any, count: Any) -> None:
    builder.store(builder.ptrtoint(entry, _I64), _word(builder, _FUNCTION))
    builder.store(builder.ptrtoint(environment, _I64), _word(builder, _ENVIRONMENT))
    builder.store(count, _word(builder, _COUNT))
    _store(builder, _NEXT, _I64(0))
    _store(builder, _OPEN, _I64(1))
    _add(builder, _GENERATION, 1)
    with builder.if_then(builder.icmp_signed(">", _load(builder, _SLEEPING), _I64(0))):
        _futex(builder, _FUTEX_WAKE, _I64(_WORDS))
    _take_chunks(builder, entry, environment, count)
    _store(builder, _OPEN, _I64(0))
    wait = builder.append_basic_block("join")
    end = builder.append_basic_block("rest")
    builder.branch(wait)
    builder.position_at_end(wait)
    _relax(builder)
    builder.cbranch(builder.icmp_signed(">", _load(builder, _ACTIVE), _I64(0)), wait, end)
    builder.position_at_end(end)
    _store(builder, _BUSY, _I64(0))


parallel_for = cast(Callable[..., None], intrinsic(_fork_typing))
"""`parallel_for(kernel, arguments, count)`: kernel(*arguments, chunk) for each chunk < count.

The kernel is a compiled function of the module; it writes what belongs to its chunk and no more,
and returns nothing. Returns when all chunks are done.
"""


# --- the helpers' side ---


def _join_typing(_context: Any, seen: Any) -> Any:
    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        slot = cgutils.alloca_once_value(builder, _I64(0))
        _emit_wait(builder, args[0], slot)
        generation = _load(builder, _GENERATION)
        _add(builder, _ACTIVE, 1)
        with builder.if_then(builder.icmp_signed("!=", _load(builder, _OPEN), _I64(0))):
            address = builder.load(_word(builder, _FUNCTION))
            entry = builder.inttoptr(address, _ENTRY.as_pointer())
            environment = builder.inttoptr(builder.load(_word(builder, _ENVIRONMENT)), _BYTES)
            _take_chunks(builder, entry, environment, builder.load(_word(builder, _COUNT)))
        _add(builder, _ACTIVE, -1)
        return generation

    return types.int64(types.int64), codegen


def _emit_wait(builder: ir.IRBuilder, seen: Any, spins: Any) -> None:
    """Returns once GENERATION is not `seen`."""
    look = builder.append_basic_block("look")
    idle = builder.append_basic_block("idle")
    sleep = builder.append_basic_block("sleep")
    end = builder.append_basic_block("called")
    builder.branch(look)
    builder.position_at_end(look)
    is_new = builder.icmp_signed("!=", _load(builder, _GENERATION), seen)
    builder.cbranch(is_new, end, idle)
    builder.position_at_end(idle)
    _relax(builder)
    count = builder.add(builder.load(spins), _I64(1))
    builder.store(count, spins)
    builder.cbranch(builder.icmp_signed("<", count, _I64(_SPINS)), look, sleep)
    builder.position_at_end(sleep)
    builder.store(_I64(0), spins)
    _add(builder, _SLEEPING, 1)
    _futex(builder, _FUTEX_WAIT, builder.and_(seen, _I64(0xFFFFFFFF)))
    _add(builder, _SLEEPING, -1)
    builder.branch(look)
    builder.position_at_end(end)


def _stopped_typing(_context: Any) -> Any:
    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, _args: Any) -> Any:
        return _load(builder, _STOP)

    return types.int64(), codegen


_join = cast(Callable[[int], int], intrinsic(_join_typing))
_stopped = cast(Callable[[], int], intrinsic(_stopped_typing))


@njit
def _help(generation: int) -> None:
    """A helper's life."""
    while _stopped() == 0:
        generation = _join(generation)


@njit
def _nothing(_chunk: int) -> None:
    """A fork of nothing, which makes all helpers look at the state."""


@njit
def _call_all() -> None:
    parallel_for(_nothing, (), 2)


# --- starting and stopping ---

_threads: list[threading.Thread] = []
_lock = threading.Lock()


def start_team(num_threads: int) -> None:
    """Give the kernels of this process a team: the calling thread and `num_threads` - 1 helpers.

    A team that is there is replaced. Where the operating system has no futex there are no helpers.

    Raises:
        ValueError: `num_threads` is less than 1.
    """
    if num_threads < 1:
        raise ValueError(f"a team has {num_threads} threads, expected at least 1")
    stop_team()
    if sys.platform != "linux" or not _FUTEX_NUMBER:
        return
    with _lock:
        _help.compile("void(int64)")  # type: ignore[attr-defined]
        for index in range(1, num_threads):
            thread = threading.Thread(
                target=_help, args=(int(_state[_GENERATION]),), name=f"kernel-team-{index}",
                daemon=True,
            )  # fmt: skip
            thread.start()
            _threads.append(thread)
        _state[_HELPERS] = len(_threads)


def stop_team() -> None:
    """Ends the helpers; kernels then run in the thread that calls them."""
    with _lock:
        if not _threads:
            return
        _state[_STOP] = 1
        while any(thread.is_alive() for thread in _threads):
            _call_all()  # wakes those that sleep
            _threads[0].join(0.001)
            _threads[:] = [thread for thread in _threads if thread.is_alive()]
        _state[_HELPERS] = 0
        _state[_STOP] = 0


def team_size() -> int:
    """Threads that compute, the caller's included."""
    return 1 + len(_threads)


atexit.register(stop_team)
