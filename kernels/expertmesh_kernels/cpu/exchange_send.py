"""The first half of an exchange: rows are split and written, and go to all expert workers at once.

See `expertmesh_kernels.cpu.exchange_words` for words and letters.
"""

from __future__ import annotations

import errno

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu import exchange_words as words
from expertmesh_kernels.cpu import messages as pb
from expertmesh_kernels.cpu import sockets
from expertmesh_kernels.cpu.call_times import call_experts, class_of, late_after_ns
from expertmesh_kernels.cpu.checksum import SEAL_BYTES, put_seal
from expertmesh_kernels.cpu.copies import NUM_EXPERTS, NUM_SOLE, choose_copies, set_costs
from expertmesh_kernels.cpu.dispatch import count_rows, fill_rows
from expertmesh_kernels.cpu.exchange_words import Bytes, Route, Words
from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.memory import array_at, copy_bytes

_LENGTH_BYTES = 4
_LONGEST_WAIT_NS = 3600 * 10**9
_NS_PER_US = 1000
_MAX_UINT32 = 2**32 - 1
_EAGAIN = errno.EAGAIN


@njit
def send(
    state: Words,
    links_W: Words,
    calls_WC: Words,
    is_fixed: bool,
    worker_of_expert_E: NDArray[np.int32],
    copies_ER: NDArray[np.int32],
    penalty_W: Words,
    topk_ids_TK: NDArray[np.int32],
    num_generated_rows: int,
    rows_address: int,
    deadline_s: float,
) -> bool:
    """Sends each expert worker its rows, as far as the sockets take them at once.

    Returns False, with nothing sent, if an expert cannot be asked for now: links to who holds it
    are not ready, or have too few credits.

    Args:
        state: Layer and micro-batch of the call are set already.
        links_W: Addresses of the links.
        calls_WC: Takes what each expert worker gets.
        is_fixed: Whether each expert has one copy.
        worker_of_expert_E: Who is asked then.
        copies_ER: All copies; see `choose_copies`.
        penalty_W: Factors of what an expert costs on each expert worker.
        topk_ids_TK: Chosen experts, different within a row.
        num_generated_rows: Leading rows that belong to generated tokens.
        rows_address: Of the hidden states, contiguous; bits of elements are what travels.
        deadline_s: On the monotonic clock.
    """
    route = is_fixed, worker_of_expert_E, copies_ER, penalty_W
    if not _plan(state, links_W, calls_WC, route, topk_ids_TK, num_generated_rows):
        return False
    num_rows = topk_ids_TK.shape[0]
    broken_T = array_at(state[words.STATE_BROKEN], num_rows, words.BYTES)
    for t in range(num_rows):
        broken_T[t] = 0
    state[words.STATE_NUM_BROKEN] = 0
    at = int(np.int64(0))  # a constant would be another type
    for w in range(links_W.size):
        call = calls_WC[w]
        if call[words.CALL_ROWS] == 0:
            continue
        now_ns = sockets.monotonic_ns()
        left_ns = int(min(deadline_s * 1e9 - now_ns, float(_LONGEST_WAIT_NS)))
        link = words.link_at(links_W[w])
        limit_ns = now_ns + _late_after_ns(state, link, call, left_ns)
        time_left_us = left_ns // _NS_PER_US
        at = _put_frame(state, link, call, w, at, time_left_us, rows_address, broken_T)
        call[words.CALL_SENT_NS], call[words.CALL_LIMIT_NS], call[words.CALL_IS_OPEN] = (
            now_ns,
            limit_ns,
            1,
        )
        link[words.LINK_ROWS_OUT] += call[words.CALL_ROWS]
        link[words.LINK_BYTES_OUT] += (
            call[words.CALL_ROWS] * state[words.STATE_HIDDEN] * state[words.STATE_ITEMSIZE]
        )
        send_more(state, link, call)
    return True


@njit
def _plan(
    state: Words,
    links_W: Words,
    calls_WC: Words,
    route: Route,
    topk_ids_TK: NDArray[np.int32],
    num_generated_rows: int,
) -> bool:
    """Splits the routing; False if an expert worker cannot take what it should get."""
    num_workers, num_pairs = links_W.size, topk_ids_TK.size
    is_fixed, worker_of_expert_E = route[0], route[1]
    asked_W2 = np.zeros((num_workers, 2), np.int64)
    for w in range(num_workers):
        for word in range(words.NUM_CALL_WORDS):
            calls_WC[w, word] = 0
    if not is_fixed:
        worker_of_expert_E = np.empty_like(worker_of_expert_E)
        if not _choose(state, links_W, route, topk_ids_TK, worker_of_expert_E, asked_W2):
            return False
    count_rows(topk_ids_TK, worker_of_expert_E, num_generated_rows, calls_WC)
    row, pair = 0, 0
    for w in range(num_workers):
        link, call = words.link_at(links_W[w]), calls_WC[w]
        num_rows = call[words.CALL_ROWS]
        if num_rows and (
            link[words.LINK_READY] == 0
            or num_rows + link[words.LINK_IN_FLIGHT] > link[words.LINK_CREDITS]
        ):
            return False
        if num_rows and not is_fixed:
            call[words.CALL_SIZE] = class_of(call[words.CALL_PAIRS], asked_W2[w, NUM_EXPERTS])
            call[words.CALL_MAY_MOVE] = asked_W2[w, NUM_SOLE] == 0
        call[words.CALL_FIRST_ROW], call[words.CALL_FIRST_PAIR] = row, pair
        row, pair = row + call[words.CALL_ROWS], pair + call[words.CALL_PAIRS]
    fill_rows(
        topk_ids_TK,
        worker_of_expert_E,
        calls_WC,
        array_at(state[words.STATE_ROW_IDS], num_pairs, words.INTS),
        array_at(state[words.STATE_ROW_OFFSETS], num_pairs + num_workers, words.UINTS),
        array_at(state[words.STATE_EXPERT_IDS], num_pairs, words.UINTS),
        array_at(state[words.STATE_SLOT_IDS], num_pairs, words.INTS),
    )
    return True


@njit
def _choose(
    state: Words,
    links_W: Words,
    route: Route,
    topk_ids_TK: NDArray[np.int32],
    worker_of_expert_E: NDArray[np.int32],
    asked_W2: Words,
) -> bool:
    """`choose_copies` among the links that are ready."""
    _, _, copies_ER, penalty_W = route
    rows_E = np.zeros(worker_of_expert_E.size, np.int64)
    for t in range(topk_ids_TK.shape[0]):
        for expert in topk_ids_TK[t]:
            rows_E[expert] += 1
    slowness_W, queue_W = np.zeros(links_W.size, np.int64), np.zeros(links_W.size, np.int64)
    for w in range(links_W.size):
        link = words.link_at(links_W[w])
        if link[words.LINK_READY] != 0:
            slowness_W[w], queue_W[w] = link[words.LINK_SLOWNESS], link[words.LINK_QUEUE_US]
    cost_W = np.empty(links_W.size, np.int64)
    set_costs(slowness_W, penalty_W, cost_W)
    call = call_experts(words.times_at(state))
    return choose_copies(rows_E, copies_ER, cost_W, call, queue_W, worker_of_expert_E, asked_W2)


@njit
def _late_after_ns(state: Words, link: Words, call: Words, left_ns: int) -> int:
    """All the time there is, unless others could be asked."""
    if call[words.CALL_MAY_MOVE] == 0:
        return left_ns
    times = words.times_at(state)
    after_ns = late_after_ns(times, call[words.CALL_SIZE], link[words.LINK_SLOWNESS])
    if after_ns == 0:
        after_ns = int(left_ns * words.FIRST_TRY_SHARE)
    return min(after_ns, left_ns)


@njit
def _put_frame(
    state: Words,
    link: Words,
    call: Words,
    worker: int,
    at: int,
    time_left_us: int,
    rows_address: int,
    broken_T: Bytes,
) -> int:
    """A ForwardRequest behind its length; where the next may begin."""
    overhead = words.FRAME_OVERHEAD + 4 * (call[words.CALL_ROWS] + 1 + call[words.CALL_PAIRS])
    frames = array_at(state[words.STATE_FRAMES], at + overhead, words.BYTES)
    rows_at = _put_head(state, link, call, worker, frames, at + _LENGTH_BYTES, time_left_us)
    end = _put_rows(state, call, rows_at, rows_address, broken_T)
    frames = array_at(state[words.STATE_FRAMES], end + SEAL_BYTES, words.BYTES)
    end = put_seal(frames, at + _LENGTH_BYTES, end)
    pb.put_fixed(frames, at, end - at - _LENGTH_BYTES, _LENGTH_BYTES)
    call[words.CALL_SEND_AT], call[words.CALL_SEND_END] = at, end
    return end


@njit
def _put_rows(state: Words, call: Words, at: int, rows_address: int, broken_T: Bytes) -> int:
    """The rows of a call; zeros for those that are not finite, which are marked."""
    itemsize, exponent = state[words.STATE_ITEMSIZE], state[words.STATE_EXPONENT]
    size, first = state[words.STATE_HIDDEN] * itemsize, call[words.CALL_FIRST_ROW]
    row_ids = array_at(state[words.STATE_ROW_IDS], first + call[words.CALL_ROWS], words.INTS)
    for r in range(first, row_ids.size):
        source, target = rows_address + row_ids[r] * size, state[words.STATE_FRAMES] + at
        if words.is_finite(source, size, itemsize, exponent):
            copy_bytes(target, source, size)
        else:
            zeros = array_at(target, size, words.BYTES)
            for i in range(size):
                zeros[i] = 0
            state[words.STATE_NUM_BROKEN] += 1
            broken_T[row_ids[r]] = 1
        at += size
    return at


@njit
def _put_head(
    state: Words, link: Words, call: Words, worker: int, frames: Bytes, at: int, time_left_us: int
) -> int:
    """The fields of a ForwardRequest up to the data of its rows, as `RequestFrame` writes them."""
    at = pb.put_length(frames, at, pb.REQUEST_ID, _id_size(state))
    at = _put_id(state, frames, at)
    at = pb.put_fixed64(frames, at, pb.REQUEST_INCARNATION, link[words.LINK_INCARNATION])
    at = pb.put_fixed64(frames, at, pb.REQUEST_MODEL_FINGERPRINT, state[words.STATE_FINGERPRINT])
    offsets = state[words.STATE_ROW_OFFSETS] + 4 * (call[words.CALL_FIRST_ROW] + worker)
    at = _put_bytes(frames, at, pb.REQUEST_ROW_OFFSETS, offsets, 4 * (call[words.CALL_ROWS] + 1))
    experts = state[words.STATE_EXPERT_IDS] + 4 * call[words.CALL_FIRST_PAIR]
    at = _put_bytes(frames, at, pb.REQUEST_EXPERT_IDS, experts, 4 * call[words.CALL_PAIRS])
    at = pb.put_number(frames, at, pb.REQUEST_NUM_GENERATED_ROWS, call[words.CALL_GENERATED])
    time_left_us = min(max(1, time_left_us), _MAX_UINT32)
    at = pb.put_number(frames, at, pb.REQUEST_TIME_LEFT_US, time_left_us)
    return _put_tensor_head(state, call[words.CALL_ROWS], frames, at)


@njit
def _id_size(state: Words) -> int:
    size = 9 + 5 + 1  # a fixed number, five tags, an attempt of 0
    for word in range(words.STATE_EPOCH, words.STATE_MICRO_BATCH + 1):
        size += pb.varint_size(state[word])
    return size


@njit
def _put_id(state: Words, frames: Bytes, at: int) -> int:
    at = pb.put_fixed64(frames, at, pb.CALL_ID_GATEWAY, state[words.STATE_GATEWAY])
    at = pb.put_number(frames, at, pb.CALL_ID_EPOCH, state[words.STATE_EPOCH])
    at = pb.put_number(frames, at, pb.CALL_ID_STEP, state[words.STATE_STEP])
    at = pb.put_number(frames, at, pb.CALL_ID_LAYER, state[words.STATE_LAYER])
    at = pb.put_number(frames, at, pb.CALL_ID_MICRO_BATCH, state[words.STATE_MICRO_BATCH])
    return pb.put_number(frames, at, pb.CALL_ID_ATTEMPT, 0)


@njit
def _put_bytes(frames: Bytes, at: int, field: int, address: int, count: int) -> int:
    at = pb.put_length(frames, at, field, count)
    copy_bytes(frames.ctypes.data + at, address, count)
    return at + count


@njit
def _put_tensor_head(state: Words, num_rows: int, frames: Bytes, at: int) -> int:
    """Hidden states up to their data."""
    hidden, code = state[words.STATE_HIDDEN], state[words.STATE_DTYPE]
    num_bytes = num_rows * hidden * state[words.STATE_ITEMSIZE]
    extents = pb.varint_size(num_rows) + pb.varint_size(hidden)
    before = 3 + pb.varint_size(code) + pb.varint_size(extents) + extents
    size = before + pb.varint_size(num_bytes) + num_bytes
    at = pb.put_length(frames, at, pb.REQUEST_HIDDEN_STATES, size)
    at = pb.put_number(frames, at, pb.TENSOR_DTYPE, code)
    at = pb.put_length(frames, at, pb.TENSOR_SHAPE, extents)
    at = pb.put_varint(frames, at, num_rows)
    at = pb.put_varint(frames, at, hidden)
    return pb.put_length(frames, at, pb.TENSOR_DATA, num_bytes)


@njit
def send_more(state: Words, link: Words, call: Words) -> None:
    """Sends what the socket takes. An error is kept; the socket then has news for `poll`."""
    frames = array_at(state[words.STATE_FRAMES], call[words.CALL_SEND_END], words.BYTES)
    while call[words.CALL_SEND_AT] < call[words.CALL_SEND_END]:
        at = call[words.CALL_SEND_AT]
        count = sockets.send(link[words.LINK_FD], frames, at, call[words.CALL_SEND_END] - at)
        if count < 0:
            if count != -_EAGAIN:
                call[words.CALL_ERROR] = -count
            return
        call[words.CALL_SEND_AT] = at + count
