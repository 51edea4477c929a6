"""The second half of an exchange: replies are read, checked, put into their slots and combined.

See `expertmesh_kernels.cpu.exchange_words` for words and letters.
"""

from __future__ import annotations

import errno
import select

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu import exchange_words as words
from expertmesh_kernels.cpu import messages as pb
from expertmesh_kernels.cpu import sockets
from expertmesh_kernels.cpu.call_times import see
from expertmesh_kernels.cpu.checksum import is_sealed
from expertmesh_kernels.cpu.combine import combine
from expertmesh_kernels.cpu.exchange_send import send_more
from expertmesh_kernels.cpu.exchange_words import UNUSUAL, Bytes, Words
from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.memory import array_at, copy_bytes
from expertmesh_kernels.cpu.primitives import narrow_like

_LENGTH_BYTES = 4
_NS_PER_US = 1000
_NS_PER_MS = 1_000_000
_EAGAIN = errno.EAGAIN
_IN, _OUT = select.POLLIN, select.POLLOUT
_WAITING, _ANSWERED = 0, 1


@njit
def receive(
    state: Words,
    links_W: Words,
    calls_WC: Words,
    weights_TK: NDArray[np.float32],
    out_address: int,
    like: NDArray[np.generic],
) -> int:
    """Waits for all replies; out[t] = the weighted sum over the slots of row t.

    Returns the longest time in microseconds that an expert worker computed, or `UNUSUAL`: a reply
    is late, is not what was asked for, or its connection has ended. Then the calls say
    which have come; bytes that were not taken are still in the buffers of the readers.

    Args:
        state: As `send` left it.
        links_W: Addresses of the links.
        calls_WC: As `send` left them.
        weights_TK: Gate weights.
        out_address: Of contiguous rows.
        like: An empty array of the type of outputs.
    """
    longest_us = _receive_all(state, links_W, calls_WC)
    if longest_us != UNUSUAL:
        _combine(state, weights_TK, out_address, like)
    return longest_us


@njit
def _receive_all(state: Words, links_W: Words, calls_WC: Words) -> int:
    """`receive` without the sums, compiled once for all types of outputs."""
    num_workers, num_open, longest_us = links_W.size, 0, 0
    values, lengths = np.empty(pb.NUM_FIELDS, np.int64), np.empty(pb.NUM_FIELDS, np.int64)
    fds, events = np.empty(num_workers, np.int64), np.empty(num_workers, np.int64)
    happened = np.full(num_workers, 0, np.int64)
    for w in range(num_workers):
        num_open += calls_WC[w, words.CALL_IS_OPEN]
    is_first = True  # look at what has been read already
    while num_open > 0:
        for w in range(num_workers):
            call = calls_WC[w]
            if call[words.CALL_IS_OPEN] == 0 or not (is_first or happened[w] != 0):
                continue
            link = words.link_at(links_W[w])
            progress = _advance(state, link, call, happened[w], values, lengths)
            if progress == UNUSUAL:
                return UNUSUAL
            num_open -= progress
            longest_us = max(longest_us, call[words.CALL_COMPUTE_US])
        is_first = False
        if num_open > 0 and not _wait(links_W, calls_WC, fds, events, happened):
            return UNUSUAL
    return longest_us


@njit
def _wait(links_W: Words, calls_WC: Words, fds: Words, events: Words, happened: Words) -> bool:
    """Until something happens; False if a call is late before."""
    now_ns = sockets.monotonic_ns()
    first_ns = 2**62
    for w in range(links_W.size):
        call = calls_WC[w]
        fds[w], events[w] = -1, 0
        if call[words.CALL_IS_OPEN] != 0:
            first_ns = min(first_ns, int(call[words.CALL_LIMIT_NS]))
            fds[w] = words.link_at(links_W[w])[words.LINK_FD]
            events[w] = _IN
            if call[words.CALL_SEND_AT] < call[words.CALL_SEND_END]:
                events[w] = _IN | _OUT
    # Without time left it is a look at what has come: perhaps it was us who did not run.
    left_ms = max(0, -int((now_ns - first_ns) // _NS_PER_MS))
    return sockets.poll(fds, events, happened, left_ms) > 0


@njit
def _advance(
    state: Words,
    link: Words,
    call: Words,
    happened: int,
    values: Words,
    lengths: Words,
) -> int:
    """Sends and reads what can be; whether the call is answered now."""
    if happened & _OUT:
        send_more(state, link, call)
    reader = array_at(link[words.LINK_READER], words.NUM_READER_WORDS, words.INTS)
    size, used = reader[words.READER_SIZE], reader[words.READER_USED]
    buffer = array_at(reader[words.READER_BUFFER], size, words.BYTES)
    if happened & ~_OUT:  # also an error, or the end
        count = sockets.receive(link[words.LINK_FD], buffer, used, size - used)
        if count <= 0 and count != -_EAGAIN:
            call[words.CALL_ERROR] = -count
            return UNUSUAL
        used += max(0, count)
        reader[words.READER_USED] = used
    if call[words.CALL_ERROR] != 0:
        return UNUSUAL
    if used < _LENGTH_BYTES:
        return _WAITING
    end = _LENGTH_BYTES + int(pb.get_fixed(buffer, 0, _LENGTH_BYTES))
    if end > size:
        return UNUSUAL
    if used < end:
        return _WAITING
    if not _take(state, link, call, buffer, end, values, lengths):
        return UNUSUAL
    copy_bytes(buffer.ctypes.data, buffer.ctypes.data + end, used - end)
    reader[words.READER_USED] = used - end
    return _ANSWERED


@njit
def _take(
    state: Words,
    link: Words,
    call: Words,
    buffer: Bytes,
    end: int,
    values: Words,
    lengths: Words,
) -> bool:
    """Puts the outputs of a reply into their slots and counts it; False if it is not the right one.

    Only the checks that find out whether it is; who else looks at it says what is wrong.
    """
    begin = int(np.int64(_LENGTH_BYTES))  # a constant would be another type
    if not is_sealed(buffer, begin, end):
        return False
    if not pb.scan(buffer, begin, end, pb.RESPONSE_KINDS, values, lengths):
        return False
    if values[pb.RESPONSE_INCARNATION] != link[words.LINK_INCARNATION]:
        return False
    if lengths[pb.RESPONSE_ERROR] != pb.ABSENT or lengths[pb.RESPONSE_OUTPUTS] == pb.ABSENT:
        return False
    compute_us, credits = values[pb.RESPONSE_COMPUTE_US], values[pb.RESPONSE_ROW_CREDITS]
    queue_us = values[pb.RESPONSE_QUEUE_US]
    if (compute_us | credits | queue_us) >> 32:
        return False
    id_at, id_size = values[pb.RESPONSE_ID], lengths[pb.RESPONSE_ID]
    at, size = values[pb.RESPONSE_OUTPUTS], lengths[pb.RESPONSE_OUTPUTS]
    if not _is_id(state, buffer, id_at, id_at + id_size, values, lengths):
        return False
    data_at = _find_data(state, call, buffer, at, at + size, values, lengths)
    if data_at < 0 or not _scatter(state, call, buffer, data_at):
        return False
    call[words.CALL_IS_OPEN], call[words.CALL_COMPUTE_US] = 0, compute_us
    if credits > 0:
        link[words.LINK_CREDITS] = credits
    pairs, hidden = call[words.CALL_PAIRS], state[words.STATE_HIDDEN]
    link[words.LINK_CALLS] += 1
    link[words.LINK_ROWS_BACK] += pairs
    link[words.LINK_BYTES_BACK] += pairs * hidden * state[words.STATE_ITEMSIZE]
    link[words.LINK_COMPUTE_US] += compute_us
    took_ns = sockets.monotonic_ns() - call[words.CALL_SENT_NS]
    link[words.LINK_ROUND_TRIP_US] += took_ns // _NS_PER_US
    if call[words.CALL_SIZE] > 0:
        slowness, times = link[words.LINK_SLOWNESS], words.times_at(state)
        link[words.LINK_SLOWNESS] = see(times, call[words.CALL_SIZE], slowness, took_ns)
        link[words.LINK_QUEUE_US] = queue_us
    return True


@njit
def _is_id(state: Words, buffer: Bytes, at: int, end: int, values: Words, lengths: Words) -> bool:
    """Whether buffer[at:end] is the id of the call that is open."""
    if end < at or not pb.scan(buffer, at, end, pb.CALL_ID_KINDS, values, lengths):
        return False
    return bool(
        values[pb.CALL_ID_GATEWAY] == state[words.STATE_GATEWAY]
        and values[pb.CALL_ID_EPOCH] == state[words.STATE_EPOCH]
        and values[pb.CALL_ID_STEP] == state[words.STATE_STEP]
        and values[pb.CALL_ID_LAYER] == state[words.STATE_LAYER]
        and values[pb.CALL_ID_MICRO_BATCH] == state[words.STATE_MICRO_BATCH]
        and values[pb.CALL_ID_ATTEMPT] == 0
    )


@njit
def _find_data(
    state: Words, call: Words, buffer: Bytes, at: int, end: int, values: Words, lengths: Words
) -> int:
    """Where the data of the outputs buffer[at:end] begins; -1 if they are not as they should be."""
    if not pb.scan(buffer, at, end, pb.TENSOR_KINDS, values, lengths):
        return -1
    if values[pb.TENSOR_DTYPE] != state[words.STATE_DTYPE]:
        return -1
    if lengths[pb.TENSOR_ROW_SCALES] != pb.ABSENT:
        return -1
    pairs, hidden = call[words.CALL_PAIRS], state[words.STATE_HIDDEN]
    shape_end = values[pb.TENSOR_SHAPE] + lengths[pb.TENSOR_SHAPE]
    got_pairs, at = pb.get_varint(buffer, values[pb.TENSOR_SHAPE], shape_end)
    if at < 0 or got_pairs != pairs:
        return -1
    got_hidden, at = pb.get_varint(buffer, at, shape_end)
    if at != shape_end or got_hidden != hidden:
        return -1
    if lengths[pb.TENSOR_DATA] != pairs * hidden * state[words.STATE_ITEMSIZE]:
        return -1
    return int(values[pb.TENSOR_DATA])


@njit
def _scatter(state: Words, call: Words, buffer: Bytes, data_at: int) -> bool:
    """Outputs to their slots; False if an element is not finite."""
    itemsize, exponent = state[words.STATE_ITEMSIZE], state[words.STATE_EXPONENT]
    size, first = state[words.STATE_HIDDEN] * itemsize, call[words.CALL_FIRST_PAIR]
    slot_ids = array_at(state[words.STATE_SLOT_IDS], first + call[words.CALL_PAIRS], words.INTS)
    source = buffer.ctypes.data + data_at
    for n in range(first, slot_ids.size):
        target = state[words.STATE_OUTPUTS] + slot_ids[n] * size
        copy_bytes(target, source, size)
        if not words.is_finite(target, size, itemsize, exponent):
            return False
        source += size
    return True


@njit
def _combine(
    state: Words, weights_TK: NDArray[np.float32], out_address: int, like: NDArray[np.generic]
) -> None:
    """`combine` of all slots; NaN for rows that are not finite."""
    num_rows, num_slots, hidden = weights_TK.shape[0], weights_TK.size, state[words.STATE_HIDDEN]
    outputs_SH = array_at(state[words.STATE_OUTPUTS], num_slots * hidden, like)
    out_TH = array_at(out_address, num_rows * hidden, like).reshape((num_rows, hidden))
    combine(outputs_SH.reshape((num_slots, hidden)), weights_TK, out_TH)
    if state[words.STATE_NUM_BROKEN] > 0:
        broken_T = array_at(state[words.STATE_BROKEN], num_rows, words.BYTES)
        for t in range(num_rows):
            for h in range(hidden if broken_T[t] != 0 else 0):
                out_TH[t, h] = narrow_like(np.float32(np.nan), out_TH)
