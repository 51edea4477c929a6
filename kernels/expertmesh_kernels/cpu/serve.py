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

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.checksum import SEAL_BYTES, put_seal
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
    LENGTH_BYTES,
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
from expertmesh_kernels.cpu.memory import address_of, array_at, copy_bytes
from expertmesh_kernels.cpu.messages import CALL_ID_GATEWAY, CALL_ID_STEP
from expertmesh_kernels.cpu.mlp import grouped_mlp
from expertmesh_kernels.cpu.sockets import monotonic_ns
from expertmesh_kernels.cpu.words import add_word, give_back, load_word, try_take

UNUSUAL = 5
"""The message at hand is for Python; other ends are those of `next_frame`."""

GATEWAY, STEP, BEGAN_NS = NUM_FRAME_WORDS, NUM_FRAME_WORDS + 1, NUM_FRAME_WORDS + 2
"""The latest step of the connection's calls, and when its first call came."""
STARTED_NS = NUM_FRAME_WORDS + 3
"""When the call at hand got the device."""
NUM_WORDS = NUM_FRAME_WORDS + 4

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
    buffer, scratch, reply = memory
    layers_LF, numbers_LF, table_LEA, likes_LB = experts
    like_x, like_bits = likes
    checked = limits_of(limits)
    fields = new_fields()
    while True:
        end = next_frame(fd, buffer, words, checked.max_message_bytes)
        if end != FOUND:
            return end
        end, call = _begin(words, memory, shared, checked, layers_LF, like_bits, fields)
        if end != FOUND:
            return end
        words[STARTED_NS] = monotonic_ns()
        places = _places(call, checked)
        layer, x = call.layer, address_of(scratch)
        # Called from here alone: whatever contains this kernel takes seconds to compile.
        wrong_pair = grouped_mlp(
            x, (call.num_rows, checked.hidden_size), like_x,
            array_at(x + places.rows_of_pairs, call.num_pairs, INT64S),
            array_at(x + places.experts_of_pairs, call.num_pairs, INT64S),
            table_LEA[layer], likes_LB[layer],
            layers_LF[layer, WIDTH], layers_LF[layer, ACTIVATION],
            numbers_LF[layer, ALPHA], numbers_LF[layer, LIMIT],
            address_of(reply) + REPLY_DATA_AT,
        )  # fmt: skip
        end = _finish(fd, words, memory, shared, call, checked, fields, counts, wrong_pair < 0)
        if end != FOUND:
            return end
        words[BEGIN] = words[MESSAGE_END]


@njit
def _begin(
    words: Numbers,
    memory: Memory,
    shared: Shared,
    limits: Limits,
    layers_LF: Numbers,
    like_bits: NDArray[np.unsignedinteger],
    fields: Fields,
) -> tuple[int, Call]:
    """The call at hand. With FOUND it is in flight, and has the device."""
    buffer, scratch, reply = memory
    is_ordinary, call = read_call(
        buffer, words[MESSAGE], words[MESSAGE_END], limits, layers_LF, fields
    )
    if not is_ordinary:
        return UNUSUAL, call
    _note_step(words, fields.call_id[0])
    words[NEED_SCRATCH] = _places(call, limits).end
    num_bytes = call.num_pairs * limits.hidden_size * limits.itemsize
    words[NEED_REPLY] = REPLY_DATA_AT + num_bytes + SEAL_BYTES
    if words[NEED_SCRATCH] > scratch.size or words[NEED_REPLY] > reply.size:
        return NEEDS_MEMORY, call
    if not _unpack(address_of(buffer), address_of(scratch), call, limits, layers_LF, like_bits):
        return UNUSUAL, call
    return FOUND if _take_device(words, shared, call) else UNUSUAL, call


@njit
def _take_device(words: Numbers, shared: Shared, call: Call) -> bool:
    """True if the call may be computed now; it is in flight then."""
    device, wanted, refusing, in_flight = shared
    add_word(in_flight, 1)
    if load_word(refusing) == 0 and load_word(wanted) == 0 and try_take(device):
        waited_ns = monotonic_ns() - words[RECEIVED_NS]
        if call.time_left_us == 0 or waited_ns < call.time_left_us * _NS_PER_US:
            return True
        give_back(device)
    add_word(in_flight, -1)
    return False


@njit
def _finish(
    fd: int,
    words: Numbers,
    memory: Memory,
    shared: Shared,
    call: Call,
    limits: Limits,
    fields: Fields,
    counts: Counts,
    is_done: bool,
) -> int:
    """Gives the device back and sends the reply, if there is one."""
    finished_ns = monotonic_ns()
    device, _, _, in_flight = shared
    give_back(device)
    end = UNUSUAL
    if is_done:
        _, scratch, reply = memory
        compute_us = (finished_ns - words[STARTED_NS]) // _NS_PER_US
        queue_us = (words[STARTED_NS] - words[RECEIVED_NS]) // _NS_PER_US
        _count(scratch, call, limits, compute_us, counts)
        begin = put_reply_head(reply, call, fields.call_id[0], limits, queue_us, compute_us)
        put_seal(reply, begin + LENGTH_BYTES, words[NEED_REPLY] - SEAL_BYTES)
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


class Places(NamedTuple):
    """Where the parts of a call lie in the scratch, behind its rows."""

    offsets: int
    ids: int
    rows_of_pairs: int
    experts_of_pairs: int
    end: int


@njit
def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@njit
def _places(call: Call, limits: Limits) -> Places:
    offsets = _aligned(call.num_rows * limits.hidden_size * limits.itemsize)
    ids = offsets + _aligned(UINT32_BYTES * (call.num_rows + 1))
    rows = ids + _aligned(UINT32_BYTES * call.num_pairs)
    experts = rows + _aligned(8 * call.num_pairs)
    return Places(offsets, ids, rows, experts, experts + _aligned(8 * call.num_pairs))


@njit
def _unpack(
    source: int,
    scratch: int,
    call: Call,
    limits: Limits,
    layers_LF: Numbers,
    like_bits: NDArray[np.unsignedinteger],
) -> bool:
    """Copies rows and routing to where they are aligned; False if anything in them is wrong."""
    places = _places(call, limits)
    num_elements = call.num_rows * limits.hidden_size
    offsets, ids = scratch + places.offsets, scratch + places.ids
    copy_bytes(scratch, source + call.rows_at, num_elements * limits.itemsize)
    copy_bytes(offsets, source + call.offsets_at, UINT32_BYTES * (call.num_rows + 1))
    copy_bytes(ids, source + call.experts_at, UINT32_BYTES * call.num_pairs)
    bits = array_at(scratch, num_elements, like_bits)
    bits_RH = bits.reshape((call.num_rows, limits.hidden_size))
    return unpack_pairs(
        call.num_rows,
        array_at(offsets, call.num_rows + 1, UINT32S),
        array_at(ids, call.num_pairs, UINT32S),
        layers_LF[call.layer, NUM_EXPERTS],
        layers_LF[call.layer, TOP_K],
        array_at(scratch + places.rows_of_pairs, call.num_pairs, INT64S),
        array_at(scratch + places.experts_of_pairs, call.num_pairs, INT64S),
    ) and copy_rows(bits_RH, limits.exponent, bits_RH)


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
    experts = address_of(scratch) + _places(call, limits).experts_of_pairs
    experts_N = array_at(experts, call.num_pairs, INT64S)
    for n in range(call.num_pairs):
        pairs_LE[call.layer, experts_N[n]] += 1
