"""Frames of a direct connection, received into one buffer: uint32 length | message.

What was received and not answered yet is buffer[words[BEGIN] : words[END]], words being the state
of the connection, which Python reads and changes while no compiled code runs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.memory import copy_bytes
from expertmesh_kernels.cpu.messages import get_fixed
from expertmesh_kernels.cpu.sockets import monotonic_ns, receive, send

LENGTH_BYTES = 4

BEGIN, END = 0, 1
"""Of what is in the buffer."""
MESSAGE, MESSAGE_END = 2, 3
"""The message at hand."""
RECEIVED_NS = 4
"""When it was complete, or when its turn came if it was before."""
NEED_BUFFER, NEED_SCRATCH, NEED_REPLY = 5, 6, 7
"""Bytes that are needed to go on."""
ERRNO, LENGTH = 8, 9
"""What failed; the length that was announced."""
NUM_FRAME_WORDS = 10

FOUND, CLOSED, FAILED, TOO_LONG, NEEDS_MEMORY = 0, 1, 2, 3, 4
"""There is a message; the peer closed the connection; see ERRNO; see LENGTH; see NEED_..."""


@njit
def next_frame(fd: int, buffer: NDArray[np.uint8], words: NDArray[np.int64], max_bytes: int) -> int:
    """Receives until a whole message is there, of which there may be more already.

    Args:
        fd: A socket that blocks.
        buffer: Takes what comes.
        words: State of the connection.
        max_bytes: Longest message.

    Returns FOUND, or why there is none.
    """
    while True:
        begin, end = words[BEGIN], words[END]
        is_announced = end - begin >= LENGTH_BYTES
        size = np.int64(LENGTH_BYTES)
        if is_announced:
            words[LENGTH] = get_fixed(buffer, begin, LENGTH_BYTES)
            size += words[LENGTH]
        if size - LENGTH_BYTES > max_bytes:
            return TOO_LONG
        if is_announced and end - begin >= size:
            words[MESSAGE], words[MESSAGE_END] = begin + LENGTH_BYTES, begin + size
            words[RECEIVED_NS] = monotonic_ns()
            return FOUND
        if size > buffer.size:
            words[NEED_BUFFER] = size
            return NEEDS_MEMORY
        if begin == end or begin + size > buffer.size:
            copy_bytes(buffer.ctypes.data, buffer.ctypes.data + begin, end - begin)
            words[BEGIN], words[END] = 0, end - begin
        count = receive(fd, buffer, words[END], buffer.size - words[END])
        if count <= 0:
            words[ERRNO] = -count
            return CLOSED if count == 0 else FAILED
        words[END] += count


@njit
def send_all(fd: int, array: NDArray[np.uint8], at: int, end: int) -> int:
    """Sends array[at:end] over a socket that blocks; 0 or errno."""
    while at < end:
        count = send(fd, array, at, end - at)
        if count < 0:
            return int(-count)
        at += count
    return 0
