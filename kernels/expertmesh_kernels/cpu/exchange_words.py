"""Words that the two halves of an exchange with expert workers share with Python.

An exchange is one layer's round trip over direct connections in two calls of compiled code,
`expertmesh_kernels.cpu.exchange_send` and `expertmesh_kernels.cpu.exchange_receive`, for the
ordinary case alone. Nothing is passed to them that an address in a word can stand for: after
weights went through the caches every object costs a miss. Numbers of 64 unsigned bits are held as
the int64 of the same bits.

W expert workers, E experts, T tokens, K top-k, S = T * K slots, H hidden size; of one expert
worker's call R rows, N (row, expert) pairs. Copies [E, R] of an expert are R at most.

Owner: one thread. Others may set `LINK_READY` of a link to 0 at any time, and shut a connection
down; they close none that an exchange still uses.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.call_times import NUM_CLASSES, NUM_TIME_WORDS
from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.memory import array_at

Bytes = NDArray[np.uint8]
Words = NDArray[np.int64]

FIRST_TRY_SHARE = 1 / 3
"""Of the time that there is: a call that could go elsewhere is late after it, as long as nothing is
known of how long calls take."""
UNUSUAL = -1
"""From `receive`: it cannot go on."""

# A link: what is known of the stream to an expert worker.
LINK_READY, LINK_FD, LINK_READER, LINK_INCARNATION, LINK_CREDITS, LINK_IN_FLIGHT = range(6)
"""Whether the connection may be used, its descriptor, the address of the words of its reader, whom
it leads to, row credits, and how many of them others use."""
LINK_SLOWNESS, LINK_QUEUE_US = 6, 7
"""How slow the expert worker is, see `call_times`; how long its latest call waited there."""
LINK_CALLS, LINK_ROWS_OUT, LINK_BYTES_OUT, LINK_ROWS_BACK = range(8, 12)
LINK_BYTES_BACK, LINK_COMPUTE_US, LINK_ROUND_TRIP_US = range(12, 15)
"""Counters that only rise."""
NUM_LINK_WORDS = 16
FIRST_COUNTER = LINK_CALLS

READER_BUFFER, READER_SIZE, READER_USED = range(3)
NUM_READER_WORDS = 3
"""Words of `expertmesh.direct.FrameReader`."""

# A call: what one expert worker gets. The first three as `count_rows` has them.
CALL_ROWS, CALL_PAIRS, CALL_GENERATED, CALL_FIRST_ROW, CALL_FIRST_PAIR = range(5)
CALL_SEND_AT, CALL_SEND_END, CALL_SENT_NS, CALL_LIMIT_NS = range(5, 9)
"""What of the frames is not sent yet; when it was handed over; when it is late."""
CALL_IS_OPEN, CALL_ERROR, CALL_COMPUTE_US = range(9, 12)
"""Whether its reply is missing; errno of its connection; what the expert worker computed."""
CALL_SIZE, CALL_MAY_MOVE = 12, 13
"""Class of its size, 0 where nobody could be asked but who is; whether others hold all of it."""
NUM_CALL_WORDS = 14

# The state of an exchange: what is sent for a model, in a step, in the call that is open.
STATE_HIDDEN, STATE_ITEMSIZE, STATE_EXPONENT, STATE_DTYPE, STATE_FINGERPRINT = range(5)
"""H; bytes of an element, its exponent's bits, its code on the wire; the model's fingerprint."""
STATE_GATEWAY, STATE_EPOCH, STATE_STEP, STATE_LAYER, STATE_MICRO_BATCH = range(5, 10)
STATE_NUM_BROKEN = 10
"""Rows that are not finite, in whose place zeros travel."""
STATE_FRAMES, STATE_ROW_IDS, STATE_ROW_OFFSETS, STATE_EXPERT_IDS = range(11, 15)
STATE_SLOT_IDS, STATE_OUTPUTS, STATE_BROKEN = range(15, 18)
"""Addresses of memory to work in; see `attention_worker.exchange.Workspace`."""
STATE_TIMES = 18
"""Address of what is known of how long calls take; see `call_times`."""
NUM_STATE_WORDS = 19

FRAME_OVERHEAD = 256
"""Bytes of a frame beside rows and routing, at most."""

INTS = np.empty(0, np.int64)
BYTES = np.empty(0, np.uint8)
UINTS = np.empty(0, np.uint32)
USHORTS = np.empty(0, np.uint16)
"""For `array_at`."""

Route = tuple[bool, NDArray[np.int32], NDArray[np.int32], Words]
"""Where rows of a layer go, as `send` takes it."""


@njit
def times_at(state: Words) -> Words:
    """What is known of how long calls take."""
    size = NUM_CLASSES * NUM_TIME_WORDS
    return array_at(state[STATE_TIMES], size, INTS).reshape((NUM_CLASSES, NUM_TIME_WORDS))


@njit
def link_at(address: int) -> Words:
    """A link."""
    return array_at(address, NUM_LINK_WORDS, INTS)


@njit
def is_finite(address: int, size: int, itemsize: int, exponent: int) -> bool:
    """Whether no element of a row is NaN or infinite, that is, has all bits of the exponent.

    Compiled once for all types of elements.
    """
    if itemsize == 4:
        wide, most_wide = array_at(address, size // 4, UINTS), np.uint32(0)
        for i in range(wide.size):
            most_wide = max(most_wide, wide[i] & np.uint32(exponent))
        return bool(most_wide != np.uint32(exponent))
    narrow, most = array_at(address, size // 2, USHORTS), np.uint16(0)
    for i in range(narrow.size):
        most = max(most, narrow[i] & np.uint16(exponent))
    return bool(most != np.uint16(exponent))


def signed64(number: int) -> int:
    """An unsigned number of 64 bits as a word."""
    return number - 2**64 if number >= 2**63 else number
