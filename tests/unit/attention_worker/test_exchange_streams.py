"""An exchange over real streams that does not end as usual: Python goes on with what is left."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterable

import pytest
import torch

from attention_worker.exchange import Exchanged
from attention_worker.experts import RemoteExperts
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import ExpertUnavailableError
from expertmesh.v1 import expert_service_pb2 as pb
from tests.conftest import Models
from tests.support.expert_servers import Answer, faulty_server, loaded_store, map_of
from tests.support.expert_work import (
    TIMEOUT_S,
    Work,
    changed,
    local,
    remote,
    right,
    silent,
    work,
)
from tests.support.tiny_checkpoints import MIXTRAL


@pytest.fixture(scope="module")
def checkpoint(models: Models) -> Checkpoint:
    """A tiny Mixtral: 3 layers, 8 experts, top-2."""
    return Checkpoint.open(models.tiny(MIXTRAL))


def exchanged(there: RemoteExperts, todo: Work, timeout_s: float = TIMEOUT_S) -> Exchanged:
    """A dispatch that is known to have gone the ordinary way."""
    pending = todo.dispatch_on(there, timeout_s)
    assert isinstance(pending, Exchanged)
    return pending


def corrupt(reply: pb.ForwardResponse) -> None:
    reply.outputs.data = b"\xff" * len(reply.outputs.data)


@pytest.mark.parametrize("answer", [changed(corrupt), silent], ids=["not finite", "silent"])
def test_what_was_answered_stays_answered(checkpoint: Checkpoint, answer: Answer) -> None:
    """Only the rows of the call that failed are sent again, to another copy."""
    low, high = (loaded_store(checkpoint, "float32", part) for part in ("0-3", "4-7"))
    todo = work(30)
    with (
        faulty_server(low, right, "a", direct=True) as a,
        faulty_server(high, answer, "b", direct=True) as b,
        faulty_server(high, right, "c", direct=True) as c,
        remote(checkpoint, [a.entry, c.entry], direct=True) as good,
        remote(checkpoint, [a.entry, b.entry, c.entry], direct=True) as there,
    ):
        expected = todo.run(good)  # kernels are compiled now
        pending = exchanged(there, todo, timeout_s=3.0)
        assert torch.equal(expected, pending.result())
        assert [len(server.requests) for server in (a, b, c)] == [2, 1, 3]
        seen = {entry.worker_id: entry for entry in there.observations()}
        assert [(seen[name].calls, seen[name].faults) for name in "abc"] == [(1, 0), (0, 1), (2, 0)]


def test_second_dispatch_and_one_that_is_dropped(checkpoint: Checkpoint) -> None:
    """Two at a time go on in Python; one that nobody waits for is in nobody's way."""
    todo = [work(5, seed=seed, layer=seed) for seed in range(2)]
    expected = [one.run(local(checkpoint)) for one in todo]
    with (
        faulty_server(loaded_store(checkpoint, "float32"), right, direct=True) as server,
        remote(checkpoint, [server.entry], direct=True) as there,
    ):
        first = exchanged(there, todo[0])
        second = todo[1].dispatch_on(there)
        assert not isinstance(second, Exchanged)
        assert torch.equal(expected[1], second.result())
        assert torch.equal(expected[0], first.result())
        exchanged(there, todo[0])
        there.begin_step(2)
        assert torch.equal(expected[0], todo[0].run(there))
        assert torch.equal(expected[1], exchanged(there, todo[1]).result())


def test_nothing_is_exchanged_past_a_call_that_may_send_again(checkpoint: Checkpoint) -> None:
    """The retry of one micro-batch would read the replies of the other's exchange."""
    todo = [work(5, seed=seed, layer=seed) for seed in range(3)]
    expected = [one.run(local(checkpoint)) for one in todo]
    calls = itertools.count()

    def fails_once(
        request: pb.ForwardRequest, reply: pb.ForwardResponse
    ) -> Iterable[pb.ForwardResponse]:
        if request.id.layer == 1 and not next(calls):
            corrupt(reply)
        return [reply]

    with (
        faulty_server(loaded_store(checkpoint, "float32"), fails_once, "a", direct=True) as a,
        faulty_server(loaded_store(checkpoint, "float32"), fails_once, "b", direct=True) as b,
        remote(checkpoint, [a.entry, b.entry], direct=True) as there,
    ):
        first = exchanged(there, todo[0])
        second = todo[1].dispatch_on(there)
        assert torch.equal(expected[0], first.result())  # reads replies of the second, too
        third = todo[2].dispatch_on(there)
        assert not isinstance(third, Exchanged)
        started_s = time.monotonic()
        assert torch.equal(expected[1], second.result())
        assert torch.equal(expected[2], third.result())
        assert time.monotonic() - started_s < TIMEOUT_S / 3, "nobody waits for a lost reply"
        assert there.num_late_replies == 0
        assert torch.equal(expected[0], exchanged(there, todo[0]).result())


def test_connection_that_another_thread_closes(checkpoint: Checkpoint) -> None:
    """The wait ends with the stream's reason, and nobody else gets the descriptor meanwhile."""
    held = threading.Event()

    def hold(request: pb.ForwardRequest, reply: pb.ForwardResponse) -> Iterable[pb.ForwardResponse]:
        held.wait(TIMEOUT_S)
        return []

    with (
        faulty_server(loaded_store(checkpoint, "float32"), hold, direct=True) as server,
        remote(checkpoint, [server.entry], direct=True) as there,
    ):
        pending = exchanged(there, work(4))
        descriptor = there._routes.streams[0].interest[0]
        closing = threading.Timer(0.1, there.close)
        closing.start()
        started_s = time.monotonic()
        with pytest.raises(ExpertUnavailableError, match=r"CANCELLED|closed"):
            pending.result()
        assert time.monotonic() - started_s < TIMEOUT_S / 2
        closing.join(TIMEOUT_S)
        assert os.fstat(descriptor)  # ours until the next step
        held.set()


def test_stream_that_is_retired_meanwhile(checkpoint: Checkpoint) -> None:
    """The step goes on with the map that it began with; the next one has the new map."""
    store = loaded_store(checkpoint, "float32")
    todo = work(6)
    with (
        faulty_server(store, right, "a", direct=True) as a,
        faulty_server(store, right, "b", direct=True) as b,
        remote(checkpoint, [a.entry], direct=True) as there,
    ):
        pending = exchanged(there, todo)
        there.update_map(map_of(checkpoint, [b.entry]), gateway=77)
        assert torch.equal(todo.run(local(checkpoint)), pending.result())
        assert torch.equal(todo.run(local(checkpoint)), exchanged(there, todo).result())
        there.begin_step(2)
        assert torch.equal(todo.run(local(checkpoint)), todo.run(there))
        assert (len(a.requests), len(b.requests)) == (2, 1)
