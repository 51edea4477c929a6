"""Late calls are asked elsewhere too: whose reply comes first is taken, and bits are the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from attention_worker import trust
from attention_worker.exchange import Exchanged
from attention_worker.experts import RemoteExperts
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import ExpertUnavailableError
from expertmesh.v1 import attention_service_pb2 as attention_pb
from expertmesh.v1 import expert_service_pb2 as pb
from tests.conftest import Models
from tests.support.expert_servers import Answer, FaultyServer, faulty_server, loaded_store
from tests.support.expert_work import TIMEOUT_S, local, remote, right, silent, work
from tests.support.processes import poll
from tests.support.tiny_checkpoints import MIXTRAL

NUM_LEARNED = 4
"""Calls from which it is known how long they take."""
JOB = work(12)


@pytest.fixture(scope="module")
def checkpoint(models: Models) -> Checkpoint:
    """A tiny Mixtral: 3 layers, 8 experts, top-2."""
    return Checkpoint.open(models.tiny(MIXTRAL))


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> torch.Tensor:
    """The result with the experts in this process."""
    return JOB.run(local(checkpoint))


@pytest.fixture(params=[False, True], ids=["grpc", "direct"])
def direct(request: pytest.FixtureRequest) -> bool:
    """Whether expert workers offer direct connections."""
    return bool(request.param)


@contextmanager
def two_workers(
    checkpoint: Checkpoint, answer_a: Answer, answer_b: Answer, *, direct: bool
) -> Iterator[tuple[FaultyServer, RemoteExperts]]:
    """The first of two expert workers with all experts, and a client of both."""
    store = loaded_store(checkpoint, "float32")
    with (
        faulty_server(store, answer_a, "a", direct=direct) as a,
        faulty_server(store, answer_b, "b", direct=direct) as b,
        remote(checkpoint, [a.entry, b.entry], direct=direct) as there,
    ):
        yield a, there


class Gate:
    """An expert worker that answers at once, until its gate is shut: then when it opens again."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()

    def answer(
        self, request: pb.ForwardRequest, reply: pb.ForwardResponse
    ) -> Iterable[pb.ForwardResponse]:
        """See Answer."""
        assert self.open.wait(TIMEOUT_S)
        return [reply]


def learn(there: RemoteExperts) -> None:
    """Dispatches from which it is known how long calls take."""
    for _ in range(NUM_LEARNED):
        JOB.run(there)
    there.observations()


def seen(there: RemoteExperts) -> dict[str, attention_pb.ExpertObservation]:
    """News of expert workers."""
    return {entry.worker_id: entry for entry in there.observations()}


Sight = Callable[[attention_pb.ExpertObservation], bool]


@contextmanager
def opening(there: RemoteExperts, *steps: tuple[Sight, Sequence[Gate]]) -> Iterator[None]:
    """Opens gates as soon as something is seen of an expert worker, one step after the other; all
    has to happen within the context."""

    def open_all() -> None:
        for when, gates in steps:
            poll(
                lambda when=when: any(map(when, there.observations())),
                timeout_s=TIMEOUT_S,
                what="a sight",
            )
            for gate in gates:
                gate.open.set()

    opener = threading.Thread(target=open_all, name="test-opener")
    opener.start()
    yield
    opener.join(TIMEOUT_S)
    assert not opener.is_alive()


def count(server: FaultyServer) -> int:
    """Requests so far."""
    return len(server.requests)


def test_a_late_call_is_answered_by_others_and_its_reply_dropped(
    checkpoint: Checkpoint, expected: torch.Tensor, direct: bool
) -> None:
    """Nobody waits for who hangs; it is left alone until it is heard of, and then asked again."""
    store, gate = loaded_store(checkpoint, "float32"), Gate()
    with (
        faulty_server(store, gate.answer, "a", direct=direct) as slow,
        faulty_server(store, right, "b", direct=direct) as good,
        remote(checkpoint, [slow.entry, good.entry], direct=direct) as there,
    ):
        learn(there)
        gate.open.clear()
        started_s = time.monotonic()
        assert torch.equal(expected, JOB.run(there, timeout_s=60.0))
        assert time.monotonic() - started_s < 10.0, "a third of its time at most"
        news = seen(there)["a"]
        assert (news.hedges, news.faults, news.retries, news.calls) == (1, 1, 0, 0)
        before = count(slow)
        there.begin_step(2)
        assert torch.equal(expected, JOB.run(there))
        assert count(slow) == before
        gate.open.set()

        def is_asked() -> bool:
            there.begin_step(there._step_id.step + 1)
            assert torch.equal(expected, JOB.run(there))
            return count(slow) > before

        poll(is_asked, timeout_s=TIMEOUT_S, what="it is asked again")
        assert seen(there)["a"].late_replies == 1
        if direct:
            there.begin_step(there._step_id.step + 1)
            pending = JOB.dispatch_on(there)
            assert isinstance(pending, Exchanged), "compiled code sends again"
            assert torch.equal(expected, pending.result())


def test_who_is_late_may_still_be_first(
    checkpoint: Checkpoint, expected: torch.Tensor, direct: bool
) -> None:
    """If others do not answer either, the late reply is taken."""
    store, first, second = loaded_store(checkpoint, "float32"), Gate(), Gate()
    with (
        faulty_server(store, first.answer, "a", direct=direct) as a,
        faulty_server(store, second.answer, "b", direct=direct) as b,
        remote(checkpoint, [a.entry, b.entry], direct=direct) as there,
    ):
        learn(there)
        first.open.clear()
        second.open.clear()
        pending = JOB.dispatch_on(there, timeout_s=60.0)
        with opening(there, (lambda entry: entry.hedges > 0, [first, second])):
            assert torch.equal(expected, pending.result())


@pytest.mark.parametrize("is_wrong", [False, True], ids=["lost", "wrong"])
def test_others_that_fail_leave_it_to_who_is_late(
    checkpoint: Checkpoint, expected: torch.Tensor, direct: bool, is_wrong: bool
) -> None:
    """A hedge that fails ends nothing as long as the late call may be answered."""

    def only_first(
        request: pb.ForwardRequest, reply: pb.ForwardResponse
    ) -> Iterable[pb.ForwardResponse]:
        if request.id.attempt:
            if not is_wrong:
                raise ConnectionError("it ends here")
            reply.ClearField("outputs")
        return [reply]

    store, late = loaded_store(checkpoint, "float32"), Gate()
    with (
        faulty_server(store, late.answer, "a", direct=direct) as a,
        faulty_server(store, only_first, "b", direct=direct) as b,
        remote(checkpoint, [a.entry, b.entry], direct=direct) as there,
    ):
        learn(there)
        late.open.clear()
        with opening(there, (lambda entry: entry.worker_id == "b" and entry.faults > 0, [late])):
            assert torch.equal(expected, JOB.run(there, timeout_s=60.0))
        assert seen(there)["a"].calls == 1


def test_a_late_wrong_reply_harms_nothing_that_others_have_sent(
    checkpoint: Checkpoint, expected: torch.Tensor, direct: bool
) -> None:
    """Of two hedges one has answered when the late reply turns out to be wrong."""
    first, second = Gate(), Gate()

    def late_and_wrong(
        request: pb.ForwardRequest, reply: pb.ForwardResponse
    ) -> Iterable[pb.ForwardResponse]:
        if not first.open.is_set():
            assert first.open.wait(TIMEOUT_S)
            outputs = np.full(len(reply.outputs.data) // 4, 7, np.float32)
            outputs[-1] = np.nan
            reply.outputs.data = outputs.tobytes()
        return [reply]

    store = loaded_store(checkpoint, "float32")
    low, high = (loaded_store(checkpoint, "float32", part) for part in ("0-3", "4-7"))
    with (
        faulty_server(store, late_and_wrong, "a", direct=direct) as a,
        faulty_server(low, right, "b", direct=direct) as b,
        faulty_server(high, second.answer, "c", direct=direct) as c,
    ):
        others = [replace(server.entry, leaving=True) for server in (b, c)]
        with remote(checkpoint, [a.entry, *others], direct=direct) as there:
            learn(there)
            first.open.clear()
            second.open.clear()
            with opening(
                there,
                (lambda entry: entry.worker_id == "b" and entry.calls > 0, [first]),
                (lambda entry: "NaN" in entry.last_fault, [second]),
            ):
                assert torch.equal(expected, JOB.run(there, timeout_s=60.0))


def test_nobody_answers(checkpoint: Checkpoint, direct: bool) -> None:
    """The dispatch ends at its deadline and names what is missing."""
    with two_workers(checkpoint, silent, silent, direct=direct) as (_, there):
        started_s = time.monotonic()
        with pytest.raises(ExpertUnavailableError, match="no answer in time"):
            JOB.run(there, timeout_s=0.5)
        assert 0.5 <= time.monotonic() - started_s < 5.0
        assert there._common.unfinished == set()


def test_a_reply_that_is_lost_does_not_end_the_use(
    checkpoint: Checkpoint, expected: torch.Tensor, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing will come of it any more: a probe finds out that the expert worker is well."""
    monkeypatch.setattr(trust, "FIRST_BACKOFF_S", 0.05)
    lose = threading.Event()

    def answer(
        request: pb.ForwardRequest, reply: pb.ForwardResponse
    ) -> Iterable[pb.ForwardResponse]:
        if lose.is_set():
            lose.clear()
            return []
        return [reply]

    with two_workers(checkpoint, answer, right, direct=direct) as (a, there):
        learn(there)
        lose.set()
        assert torch.equal(expected, JOB.run(there, timeout_s=60.0))
        before = count(a)

        def is_asked() -> bool:
            there.begin_step(there._step_id.step + 1)
            assert torch.equal(expected, JOB.run(there))
            return count(a) > before + 1  # the probe, and then more

        poll(is_asked, timeout_s=TIMEOUT_S, what="it is asked again")
        assert a.requests[before].id.attempt >= 2**16
        assert seen(there)["a"].ejections == 1


def test_lost_replies_do_not_keep_credits(
    checkpoint: Checkpoint, expected: torch.Tensor, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If even a probe waits for credits, the stream starts over with all of them."""
    monkeypatch.setattr(trust, "FIRST_BACKOFF_S", 0.05)
    lose = threading.Event()

    def answer(
        request: pb.ForwardRequest, reply: pb.ForwardResponse
    ) -> Iterable[pb.ForwardResponse]:
        reply.row_credits = request.hidden_states.shape[0]  # what this call had, and no more
        return [] if lose.is_set() else [reply]

    with two_workers(checkpoint, answer, right, direct=direct) as (a, there):
        learn(there)
        lose.set()
        assert torch.equal(expected, JOB.run(there, timeout_s=60.0))
        lose.clear()
        before = count(a)

        def is_asked() -> bool:
            there.begin_step(there._step_id.step + 1)
            assert torch.equal(expected, JOB.run(there))
            return count(a) > before

        poll(is_asked, timeout_s=TIMEOUT_S, what="it is asked again")
        assert a.requests[before].id.attempt == 0, "no probe got there"


def test_wrong_replies_eject_for_a_while(
    checkpoint: Checkpoint, expected: torch.Tensor, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two it is not asked, and later it is."""
    num_wrong = 2

    def answer(
        request: pb.ForwardRequest, reply: pb.ForwardResponse
    ) -> Iterable[pb.ForwardResponse]:
        nonlocal num_wrong
        if num_wrong:
            num_wrong -= 1
            reply.ClearField("outputs")
        return [reply]

    with two_workers(checkpoint, answer, right, direct=direct) as (a, there):
        for step in range(2, 12):
            there.begin_step(step)
            assert torch.equal(expected, JOB.run(there))
        news = seen(there)["a"]
        assert (count(a), news.faults, news.retries, news.ejections) == (2, 2, 2, 1)
        now_s = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now_s + trust.FIRST_BACKOFF_S)
        there.begin_step(12)
        assert torch.equal(expected, JOB.run(there))
        assert count(a) == 3
