"""The life of a direct connection to an expert worker, without Python: call after call.

    receive -> read and check -> take the device -> compute into the reply -> send -> receive

A message that is not ordinary stays in the buffer, and `serve` returns UNUSUAL: Python answers it
and calls `serve` again. Not ordinary is whatever `read_call` does not take, rows or pairs that are
wrong, experts that are not here, time that is up, a worker that drains, and a device that others
have or want: Python knows how to merge calls and whose turn it is.

Threads: one a connection. What they share are words (see `expertmesh_kernels.cpu.words`): DEVICE is
held while experts compute and while addresses of weights are changed; WANTED counts who waits for
it; IN_FLIGHT of a connection is set before REFUSING of the worker is looked at, so that who sets
REFUSING and then finds no call in flight has seen the last one.

Shape letters: R rows of a call, N pairs (row, expert), H hidden size, E experts, L layers of the
model.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.dispatch import copy_rows, unpack_pairs
from expertmesh_kernels.cpu.forward_call import (
    NUM_EXPERTS,
    REPLY_DATA_AT,
    TOP_K,
    UINT32_BYTES,
    Call,
    Fields,
    Limits,
    limits_of,
    new_fields,
    put_reply_head,
    read_call,
)
from expertmesh_kernels.cpu.frames import (
    BEGIN,
    ERRNO,
    FAILED,
    FOUND,
    MESSAGE,
    MESSAGE_END,
    NEED_REPLY,
    NEED_SCRATCH,
    NEEDS_MEMORY,
    NUM_FRAME_WORDS,
    RECEIVED_NS,
    next_frame,
    send_all,
)
from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.memory import array_at, copy_bytes
from expertmesh_kernels.cpu.messages import CALL_ID_GATEWAY, CALL_ID_STEP
from expertmesh_kernels.cpu.mlp import grouped_mlp
from expertmesh_kernels.cpu.sockets import monotonic_ns
from expertmesh_kernels.cpu.words import add_word, give_back, load_word, try_take

UNUSUAL = 5
"""The message at hand is for Python; other ends are those of `next_frame`."""

GATEWAY, STEP, BEGAN_NS = NUM_FRAME_WORDS, NUM_FRAME_WORDS + 1, NUM_FRAME_WORDS + 2
"""The latest step of the connection's calls, and when its first call came."""
NUM_WORDS = NUM_FRAME_WORDS + 3

WIDTH, ACTIVATION = 2, 3
"""More columns of a table of layers: see `grouped_mlp`."""
NUM_LAYER_FIELDS = 4
ALPHA, LIMIT = 0, 1
"""Columns of a table of numbers of activations."""

CALLS, ROWS, PAIRS, COMPUTE_US = 0, 1, 2, 3
"""Of work that was counted."""

ALIGNMENT = 64
_NS_PER_US = 1000

UINT32S = np.empty(0, np.uint32)
INT64S = np.empty(0, np.int64)
"""For `array_at`."""

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]
Memory = tuple[Bytes, Bytes, Bytes]
"""What is received, scratch, the reply; the last two begin at a multiple of ALIGNMENT."""
Shared = tuple[int, int, int, int]
"""Addresses of DEVICE, WANTED, REFUSING and IN_FLIGHT."""
Experts = tuple[Numbers, NDArray[np.float32], Numbers, NDArray[np.generic]]
"""Table of layers, [L, fields]; numbers of their activations, [L, 2]; addresses of weights,
[L, E, parts]; how weights are packed, see `grouped_mlp`, [L, bytes]. The last two are read, and
the width, while the device is held."""
Counts = tuple[Numbers, Numbers, Numbers, Numbers]
"""Largest numbers of rows of buckets; what is added to: work, calls by bucket, pairs [L, E]."""
Likes = tuple[NDArray[np.generic], NDArray[np.unsignedinteger]]
"""Empty arrays of the type of rows, and of its bits."""


@njit
def serve(
    fd: int,
    words: Numbers,
    memory: Memory,
    shared: Shared,
    limits: Numbers,
    experts: Experts,
    counts: Counts,
    likes: Likes,
) -> int:
    """Answers calls until one is not ordinary, or there are no more.

    Args:
        fd: A connected socket that blocks.
        words: State of the connection, NUM_WORDS.
        memory: Belongs to the connection.
        shared: See there.
        limits: The fields of `Limits`.
        experts: See there.
        counts: Of this connection.
        likes: See there.
    """
    checked = limits_of(limits)
    fields = new_fields()
    while True:
        end = next_frame(fd, memory[0], words, checked.max_message_bytes)
        if end == FOUND:
            end = _answer(fd, words, memory, shared, checked, experts, counts, likes, fields)
        if end != FOUND:
            return end
        words[BEGIN] = words[MESSAGE_END]


@njit
def _answer(
    fd: int,
    words: Numbers,
    memory: Memory,
    shared: Shared,
    limits: Limits,
    experts: Experts,
    counts: Counts,
    likes: Likes,
    fields: Fields,
) -> int:
    """Answers the message at hand; FOUND, or why it did not."""
    buffer, scratch, reply = memory
    is_ordinary, call = read_call(
        buffer, words[MESSAGE], words[MESSAGE_END], limits, experts[0], fields
    )
    if not is_ordinary:
        return UNUSUAL
    _note_step(words, fields.call_id[0])
    words[NEED_SCRATCH] = _scratch_bytes(call, limits)
    words[NEED_REPLY] = REPLY_DATA_AT + call.num_pairs * limits.hidden_size * limits.itemsize
    if words[NEED_SCRATCH] > scratch.size or words[NEED_REPLY] > reply.size:
        return NEEDS_MEMORY
    if not _unpack(buffer, scratch.ctypes.data, call, limits, experts[0], likes[1]):
        return UNUSUAL
    in_flight = shared[3]
    add_word(in_flight, 1)
    begin = _compute(words, scratch, reply, shared, call, limits, experts, likes[0], fields, counts)
    end = FOUND if begin >= 0 else UNUSUAL
    if begin >= 0:
        words[ERRNO] = send_all(fd, reply, begin, words[NEED_REPLY])
        end = FOUND if words[ERRNO] == 0 else FAILED
    add_word(in_flight, -1)
    return end


@njit
def _note_step(words: Numbers, call_id: Numbers) -> None:
    """Remembers when the first call of a step came."""
    if call_id[CALL_ID_GATEWAY] != words[GATEWAY] or call_id[CALL_ID_STEP] != words[STEP]:
        words[GATEWAY], words[STEP] = call_id[CALL_ID_GATEWAY], call_id[CALL_ID_STEP]
        words[BEGAN_NS] = words[RECEIVED_NS]


@njit
def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@njit
def _places(call: Call, limits: Limits) -> tuple[int, int, int, int, int]:
    """Where offsets, ids, rows of pairs and experts of pairs lie behind the rows, and the end."""
    offsets = _aligned(call.num_rows * limits.hidden_size * limits.itemsize)
    ids = offsets + _aligned(UINT32_BYTES * (call.num_rows + 1))
    rows = ids + _aligned(UINT32_BYTES * call.num_pairs)
    chosen = rows + _aligned(8 * call.num_pairs)
    return offsets, ids, rows, chosen, chosen + _aligned(8 * call.num_pairs)


@njit
def _scratch_bytes(call: Call, limits: Limits) -> int:
    return _places(call, limits)[4]


@njit
def _unpack(
    buffer: Bytes,
    scratch: int,
    call: Call,
    limits: Limits,
    layers_LF: Numbers,
    like_bits: NDArray[np.unsignedinteger],
) -> bool:
    """Copies rows and routing to where they are aligned; False if anything in them is wrong."""
    source = buffer.ctypes.data
    offsets_at, ids_at, rows_at, experts_at, _ = _places(call, limits)
    num_elements = call.num_rows * limits.hidden_size
    copy_bytes(scratch, source + call.rows_at, num_elements * limits.itemsize)
    copy_bytes(scratch + offsets_at, source + call.offsets_at, UINT32_BYTES * (call.num_rows + 1))
    copy_bytes(scratch + ids_at, source + call.experts_at, UINT32_BYTES * call.num_pairs)
    bits = array_at(scratch, num_elements, like_bits)
    bits_RH = bits.reshape((call.num_rows, limits.hidden_size))
    return unpack_pairs(
        call.num_rows,
        array_at(scratch + offsets_at, call.num_rows + 1, UINT32S),
        array_at(scratch + ids_at, call.num_pairs, UINT32S),
        layers_LF[call.layer, NUM_EXPERTS],
        layers_LF[call.layer, TOP_K],
        array_at(scratch + rows_at, call.num_pairs, INT64S),
        array_at(scratch + experts_at, call.num_pairs, INT64S),
    ) and copy_rows(bits_RH, limits.exponent, bits_RH)


@njit
def _compute(
    words: Numbers,
    scratch: Bytes,
    reply: Bytes,
    shared: Shared,
    call: Call,
    limits: Limits,
    experts: Experts,
    like_x: NDArray[np.generic],
    fields: Fields,
    counts: Counts,
) -> int:
    """The reply; where it begins, or -1 if Python has to see to this call."""
    device, wanted, refusing, _ = shared
    if load_word(refusing) != 0 or load_word(wanted) != 0 or not try_take(device):
        return -1
    started_ns = monotonic_ns()
    waited_ns = started_ns - words[RECEIVED_NS]
    is_done = call.time_left_us == 0 or waited_ns < call.time_left_us * _NS_PER_US
    if is_done:
        is_done = _run_experts(scratch, reply, call, limits, experts, like_x)
    finished_ns = monotonic_ns()
    give_back(device)
    if not is_done:
        return -1
    compute_us = (finished_ns - started_ns) // _NS_PER_US
    _count(scratch, call, limits, compute_us, counts)
    return put_reply_head(
        reply, call, fields.call_id[0], limits, waited_ns // _NS_PER_US, compute_us
    )


@njit
def _run_experts(
    scratch: Bytes,
    reply: Bytes,
    call: Call,
    limits: Limits,
    experts: Experts,
    like_x: NDArray[np.generic],
) -> bool:
    """Outputs into the reply; False if an expert is not here. The device is held."""
    layers_LF, numbers_LF, table_LEA, likes_LB = experts
    layer, x = call.layer, scratch.ctypes.data
    _, _, rows_at, experts_at, _ = _places(call, limits)
    wrong_pair = grouped_mlp(
        x, (call.num_rows, limits.hidden_size), like_x,
        array_at(x + rows_at, call.num_pairs, INT64S),
        array_at(x + experts_at, call.num_pairs, INT64S),
        table_LEA[layer], likes_LB[layer],
        layers_LF[layer, WIDTH], layers_LF[layer, ACTIVATION],
        numbers_LF[layer, ALPHA], numbers_LF[layer, LIMIT],
        reply.ctypes.data + REPLY_DATA_AT,
    )  # fmt: skip
    return wrong_pair < 0


@njit
def _count(scratch: Bytes, call: Call, limits: Limits, compute_us: int, counts: Counts) -> None:
    """What `WorkerState.count_answer` counts."""
    buckets, work, histogram, pairs_LE = counts
    bucket = 0
    while bucket < buckets.size and buckets[bucket] < call.num_rows:
        bucket += 1
    histogram[bucket] += 1
    work[CALLS] += 1
    work[ROWS] += call.num_rows
    work[PAIRS] += call.num_pairs
    work[COMPUTE_US] += compute_us
    experts_at = scratch.ctypes.data + _places(call, limits)[3]
    experts_N = array_at(experts_at, call.num_pairs, INT64S)
    for n in range(call.num_pairs):
        pairs_LE[call.layer, experts_N[n]] += 1
