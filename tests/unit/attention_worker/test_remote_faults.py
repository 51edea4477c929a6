"""What remote experts do when an expert worker answers wrongly, late, or not at all."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch

from expertmesh.checkpoint import Checkpoint
from expertmesh.checksum import SEAL_BYTES
from expertmesh.errors import ExpertUnavailableError
from expertmesh.placement import ExpertWorkerEntry
from expertmesh.v1 import expert_service_pb2 as pb
from tests.conftest import Models
from tests.support.expert_servers import (
    ROW_CREDITS,
    entry_of,
    expert_server,
    faulty_server,
    loaded_store,
)
from tests.support.expert_work import (
    NUM_EXPERTS,
    TIMEOUT_S,
    changed,
    local,
    remote,
    right,
    silent,
    to_expert,
)
from tests.support.processes import poll
from tests.support.tiny_checkpoints import MIXTRAL


@pytest.fixture(scope="module")
def checkpoint(models: Models) -> Checkpoint:
    """A tiny Mixtral: 3 layers, 8 experts, top-2."""
    return Checkpoint.open(models.tiny(MIXTRAL))


@pytest.fixture(params=[False, True], ids=["grpc", "direct"])
def direct(request: pytest.FixtureRequest) -> bool:
    """Whether expert workers offer direct connections."""
    return bool(request.param)


def corrupt_data(reply: pb.ForwardResponse) -> None:
    outputs = np.frombuffer(reply.outputs.data, np.float32).copy()
    outputs[3] = np.nan
    reply.outputs.data = outputs.tobytes()


WRONG_REPLIES: dict[str, tuple[Callable[[pb.ForwardResponse], object], str]] = {
    "no result": (lambda r: r.ClearField("outputs"), "result is missing"),
    "too few rows": (lambda r: r.outputs.shape.__setitem__(0, 2), "data has"),
    "other dtype": (lambda r: setattr(r.outputs, "dtype", pb.DTYPE_FLOAT16), "data has"),
    "short data": (lambda r: setattr(r.outputs, "data", r.outputs.data[:-4]), "data has"),
    "not finite": (corrupt_data, "NaN"),
    "other life": (lambda r: setattr(r, "incarnation", 3), "incarnation of the reply"),
    "error": (
        lambda r: r.error.CopyFrom(
            pb.ForwardError(code=pb.ForwardError.CODE_INTERNAL, message="broken")
        ),
        "broken",
    ),
}


@pytest.mark.parametrize("name", WRONG_REPLIES)
def test_wrong_reply_is_a_fault_and_another_copy_is_asked(
    checkpoint: Checkpoint, direct: bool, name: str
) -> None:
    """A reply that cannot be right is never used: the result is that of the other copy."""
    change, reason = WRONG_REPLIES[name]
    store = loaded_store(checkpoint, "float32")
    todo = to_expert(2)  # even experts prefer the first expert worker
    with (
        faulty_server(store, changed(change), "a", direct=direct) as bad,
        expert_server(store, direct=direct) as good,
        remote(checkpoint, [bad.entry, entry_of(good.state, good.port)], direct=direct) as there,
    ):
        actual = todo.run(there)
        seen = {entry.worker_id: entry for entry in there.observations()}
    assert torch.equal(todo.run(local(checkpoint)), actual)
    assert len(bad.requests) == 1
    assert (seen["a"].calls, seen["a"].faults) == (0, 1)
    assert reason in seen["a"].last_fault
    assert (seen["worker"].calls, seen["worker"].faults) == (2, 0)
    assert good.state.load().errors == 0


def test_wrong_reply_without_another_copy(checkpoint: Checkpoint, direct: bool) -> None:
    """With one copy the failure names layer, experts, expert worker and reason."""
    store = loaded_store(checkpoint, "float32")
    with (
        faulty_server(store, changed(corrupt_data), direct=direct) as bad,
        remote(checkpoint, [bad.entry], direct=direct) as there,
    ):
        with pytest.raises(ExpertUnavailableError) as caught:
            to_expert(2).run(there)
        assert caught.value.missing == ((1, 2), (1, 3))
        assert f"expert worker faulty at 127.0.0.1:{bad.port}: outputs have" in str(caught.value)


def flip(bit: int, times: int = 2**30) -> Callable[[bytes], bytes]:
    """Flips a bit, counted from the end of the message, of so many messages."""
    numbers = itertools.count()

    def spoil(message: bytes) -> bytes:
        flipped = bytearray(message)
        if next(numbers) < times:
            flipped[-1 - bit // 8] ^= 1 << bit % 8
        return bytes(flipped)

    return spoil


ON_THE_WAY = {"call": "the call came changed", "reply": "does not match its checksum"}
PAYLOAD_BIT = 8 * SEAL_BYTES + 1000


@pytest.mark.parametrize("spoiled", ON_THE_WAY)
@pytest.mark.parametrize("bit", [5, PAYLOAD_BIT], ids=["checksum", "payload"])
def test_flipped_bit_is_a_fault_and_another_copy_is_asked(
    checkpoint: Checkpoint, direct: bool, spoiled: str, bit: int
) -> None:
    """Of calls and of replies; who sends or gets them so twice is ejected."""
    store = loaded_store(checkpoint, "float32")
    todo = to_expert(2)  # even experts prefer the first expert worker
    with (
        faulty_server(store, right, "a", direct=direct) as bad,
        expert_server(store, direct=direct) as good,
        remote(checkpoint, [bad.entry, entry_of(good.state, good.port)], direct=direct) as there,
    ):
        setattr(bad, f"spoil_{spoiled}", flip(bit))
        results = [todo.run(there) for _ in range(3)]
        seen = {entry.worker_id: entry for entry in there.observations()}
    assert all(torch.equal(todo.run(local(checkpoint)), actual) for actual in results)
    assert len(bad.requests) == 2
    assert (seen["a"].calls, seen["a"].faults) == (0, 2)
    assert (seen["a"].damaged, seen["a"].ejections) == (2, 1)
    assert ON_THE_WAY[spoiled] in seen["a"].last_fault
    assert (seen["worker"].calls, seen["worker"].damaged) == (5, 0)


@pytest.mark.parametrize("spoiled", ON_THE_WAY)
def test_flipped_bit_without_another_copy(
    checkpoint: Checkpoint, direct: bool, spoiled: str
) -> None:
    """The same expert worker is asked again, three times in all."""
    todo = to_expert(2)
    with (
        faulty_server(loaded_store(checkpoint, "float32"), right, direct=direct) as sole,
        remote(checkpoint, [sole.entry], direct=direct) as there,
    ):
        setattr(sole, f"spoil_{spoiled}", flip(PAYLOAD_BIT, times=2))
        assert torch.equal(todo.run(local(checkpoint)), todo.run(there))
        assert len(sole.requests) == 3
        setattr(sole, f"spoil_{spoiled}", flip(PAYLOAD_BIT))
        with pytest.raises(ExpertUnavailableError, match=ON_THE_WAY[spoiled]):
            todo.run(there)
        assert len(sole.requests) == 6


@pytest.mark.parametrize("spoiled", ON_THE_WAY)
def test_changed_identity(checkpoint: Checkpoint, direct: bool, spoiled: str) -> None:
    """If nobody knows whose reply or call it was, all calls fail at once, and others are asked."""
    store = loaded_store(checkpoint, "float32")
    todo = to_expert(2)

    def spoil(message: bytes) -> bytes:
        flipped = bytearray(message)
        flipped[3] ^= 1  # of the gateway, in the id
        return bytes(flipped)

    with (
        faulty_server(store, right, "a", direct=direct) as bad,
        expert_server(store, direct=direct) as good,
        remote(checkpoint, [bad.entry, entry_of(good.state, good.port)], direct=direct) as there,
    ):
        setattr(bad, f"spoil_{spoiled}", spoil)
        assert torch.equal(todo.run(local(checkpoint)), todo.run(there))
        (seen,) = (entry for entry in there.observations() if entry.worker_id == "a")
    assert (seen.faults, seen.hedges, seen.damaged) == (1, 0, 1)


def test_silent_expert_worker_costs_its_deadline_only(checkpoint: Checkpoint, direct: bool) -> None:
    """Without an answer the dispatch ends at its deadline; it never hangs."""
    with (
        faulty_server(loaded_store(checkpoint, "float32"), silent, direct=direct) as mute,
        remote(checkpoint, [mute.entry], direct=direct) as there,
    ):
        started = time.monotonic()
        with pytest.raises(ExpertUnavailableError, match="no answer in time"):
            to_expert(2).run(there, timeout_s=0.3)
        assert 0.3 <= time.monotonic() - started < 2.0


def test_silent_expert_worker_with_another_copy(checkpoint: Checkpoint, direct: bool) -> None:
    """The other copy is asked within the deadline, and first of all from then on."""
    store = loaded_store(checkpoint, "float32")
    todo = to_expert(2)
    expected = todo.run(local(checkpoint))
    with (
        faulty_server(store, silent, "a", direct=direct) as mute,
        expert_server(store, direct=direct) as good,
        remote(checkpoint, [mute.entry, entry_of(good.state, good.port)], direct=direct) as there,
    ):
        assert torch.equal(expected, todo.run(there, timeout_s=1.0))
        started = time.monotonic()
        assert torch.equal(expected, todo.run(there, timeout_s=20.0))
        assert time.monotonic() - started < 5.0
    assert len(mute.requests) == 1


def test_late_and_duplicate_replies_are_dropped(checkpoint: Checkpoint, direct: bool) -> None:
    """A reply after the time limit, and a second one, are counted and change nothing."""
    held: list[pb.ForwardResponse] = []

    def late_once(
        request: pb.ForwardRequest, reply: pb.ForwardResponse
    ) -> Iterable[pb.ForwardResponse]:
        held.append(reply)
        return [[], [held[0], reply, reply], [reply]][min(len(held), 3) - 1]

    with (
        faulty_server(loaded_store(checkpoint, "float32"), late_once, direct=direct) as slow,
        remote(checkpoint, [slow.entry], direct=direct) as there,
    ):
        with pytest.raises(ExpertUnavailableError):
            to_expert(4).run(there, timeout_s=0.2)
        todo = to_expert(2)
        assert torch.equal(todo.run(local(checkpoint)), todo.run(there))
        todo.run(there)  # a direct connection is read while somebody waits
        poll(lambda: there.num_late_replies == 2, timeout_s=TIMEOUT_S, what="two late replies")


def test_stopped_expert_worker_fails_calls_at_once(checkpoint: Checkpoint, direct: bool) -> None:
    """When an expert worker goes away, waiting calls fail at once; later ones are not sent."""
    gate = threading.Event()

    def hold(request: pb.ForwardRequest, reply: pb.ForwardResponse) -> Iterable[pb.ForwardResponse]:
        gate.wait(TIMEOUT_S)
        return []

    with (
        faulty_server(loaded_store(checkpoint, "float32"), hold, direct=direct) as server,
        remote(checkpoint, [server.entry], direct=direct) as there,
    ):
        pending = to_expert(2).dispatch_on(there)
        poll(lambda: bool(server.requests), timeout_s=TIMEOUT_S, what="the call arrives")
        gate.set()
        server.stop()
        started = time.monotonic()
        with pytest.raises(ExpertUnavailableError, match="expert worker faulty"):
            pending.result()
        with pytest.raises(ExpertUnavailableError, match="expert worker faulty"):
            to_expert(2).run(there)
        assert time.monotonic() - started < 5.0


def test_stream_opens_again(checkpoint: Checkpoint, direct: bool) -> None:
    """After a stream broke it is opened again by itself, and the expert worker is used again."""
    store = loaded_store(checkpoint, "float32")
    with (
        faulty_server(store, right, direct=direct) as server,
        remote(checkpoint, [server.entry], direct=direct) as there,
    ):
        todo = to_expert(2)
        todo.run(there)
        server.break_streams()

        def works() -> bool:
            try:
                return torch.equal(todo.run(local(checkpoint)), todo.run(there))
            except ExpertUnavailableError:
                return False

        poll(works, timeout_s=TIMEOUT_S, what="the stream is up again")


def test_expert_worker_that_is_not_there(checkpoint: Checkpoint) -> None:
    """Streams are opened when the map names them; a refused connection is named at dispatch."""
    nobody = ExpertWorkerEntry("ghost", "127.0.0.1:1", 5, {1: tuple(range(8))}, ROW_CREDITS)
    with remote(checkpoint, [nobody]) as there:
        started = time.monotonic()
        with pytest.raises(ExpertUnavailableError) as caught:
            to_expert(2).run(there)
        assert "expert worker ghost at 127.0.0.1:1: UNAVAILABLE" in str(caught.value)
        assert time.monotonic() - started < 5.0


def test_uncovered_expert(checkpoint: Checkpoint, direct: bool) -> None:
    """An expert without a copy is named before anything is sent; others are served."""
    with faulty_server(loaded_store(checkpoint, "float32", "0-3"), right, direct=direct) as server:
        with (
            remote(checkpoint, [], direct=direct) as nothing,
            pytest.raises(ExpertUnavailableError, match="no expert worker is known"),
        ):
            to_expert(0).run(nothing)
        with remote(checkpoint, [server.entry], direct=direct) as there:
            with pytest.raises(ExpertUnavailableError) as caught:
                to_expert(3).run(there)
            assert caught.value.missing == ((1, 4),)
            assert "no expert worker holds it" in str(caught.value)
            assert server.requests == []
            to_expert(0).run(there)


def test_refusals_lead_to_another_copy(checkpoint: Checkpoint, direct: bool) -> None:
    """Draining, stale and not-resident answers cost a retry; the first two end the use for now."""
    store = loaded_store(checkpoint, "float32")
    todo = to_expert(2)
    expected = todo.run(local(checkpoint))
    with (
        expert_server(store, worker_id="a", direct=direct) as first,
        expert_server(store, direct=direct) as second,
    ):
        entries = [entry_of(first.state, first.port), entry_of(second.state, second.port)]
        first.state.refuse_calls()
        with remote(checkpoint, entries) as there:
            assert torch.equal(expected, todo.run(there))
            assert torch.equal(expected, todo.run(there))
        assert first.state.load().errors == 1
    with (
        expert_server(
            loaded_store(checkpoint, "float32", "0"), worker_id="a", direct=direct
        ) as first,
        expert_server(store, direct=direct) as second,
    ):
        says_all = replace(
            entry_of(first.state, first.port), resident={1: tuple(range(NUM_EXPERTS))}
        )
        with remote(
            checkpoint, [says_all, entry_of(second.state, second.port)], direct=direct
        ) as there:
            assert torch.equal(expected, todo.run(there))
            seen = {entry.worker_id: entry.last_fault for entry in there.observations()}
            assert "layer 1 expert 2: not resident here" in seen["a"]
        stale = replace(entry_of(second.state, second.port), incarnation=9)
        with (
            remote(checkpoint, [stale], direct=direct) as there,
            pytest.raises(ExpertUnavailableError, match="incarnation is 0x9"),
        ):
            todo.run(there)


def test_row_credits_bound_what_is_in_flight(checkpoint: Checkpoint, direct: bool) -> None:
    """Calls beyond the credits wait for replies; one that can never fit is refused with numbers."""
    store = loaded_store(checkpoint, "float32")
    gate = threading.Semaphore(0)
    most = 0

    def count(
        request: pb.ForwardRequest, reply: pb.ForwardResponse
    ) -> Iterable[pb.ForwardResponse]:
        assert gate.acquire(timeout=TIMEOUT_S)
        reply.row_credits = 4
        return [reply]

    with (
        faulty_server(store, count, direct=direct) as server,
        remote(checkpoint, [replace(server.entry, row_credits=4)], direct=direct) as there,
    ):
        pending = [to_expert(expert, num_rows=2).dispatch_on(there) for expert in range(4)]
        poll(lambda: len(server.requests) == 1, timeout_s=TIMEOUT_S, what="the first arrives")
        stream = there._routes.streams[0]
        most = stream.link.rows_in_flight
        gate.release(4)
        for expert, call in enumerate(pending):
            expected = to_expert(expert, num_rows=2).run(local(checkpoint))
            assert torch.equal(expected, call.result())
        assert most == 4
        assert stream.link.rows_in_flight == 0
        with pytest.raises(ExpertUnavailableError, match="5 rows exceed its 4 row credits"):
            to_expert(1, num_rows=5).run(there)


def test_calls_waiting_for_credits_end_at_their_deadline(
    checkpoint: Checkpoint, direct: bool
) -> None:
    """A call that never gets credits is an error at its deadline."""
    with (
        faulty_server(loaded_store(checkpoint, "float32"), silent, direct=direct) as server,
        remote(checkpoint, [replace(server.entry, row_credits=2)], direct=direct) as there,
    ):
        first = to_expert(1, num_rows=2).dispatch_on(there, timeout_s=0.2)
        second = to_expert(3, num_rows=2).dispatch_on(there, timeout_s=0.2)
        for pending in (first, second):
            with pytest.raises(ExpertUnavailableError, match="no answer in time"):
                pending.result()
        assert len(server.requests) == 1
