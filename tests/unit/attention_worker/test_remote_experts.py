"""Remote experts: bit-equal with local ones, one message each, and what happens when they fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_worker.experts import ExpertClient, LocalExperts, Pending, RemoteExperts
from expert_worker.backend import ExpertBackend
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import ExpertUnavailableError
from expertmesh.model_config import DtypeName
from expertmesh.placement import ExpertWorkerEntry
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh_kernels.host import TORCH_DTYPES
from expertmesh_kernels.router import Routing
from tests.conftest import Models
from tests.support.expert_servers import (
    ROW_CREDITS,
    Answer,
    entry_of,
    expert_server,
    expert_servers,
    faulty_server,
    loaded_store,
    map_of,
)
from tests.support.processes import poll
from tests.support.tiny_checkpoints import MIXTRAL

TIMEOUT_S = 20.0
NUM_EXPERTS, TOP_K, HIDDEN = MIXTRAL.num_experts, MIXTRAL.top_k, MIXTRAL.hidden_size


@pytest.fixture(scope="module")
def checkpoint(models: Models) -> Checkpoint:
    """A tiny Mixtral: 3 layers, 8 experts, top-2."""
    return Checkpoint.open(models.tiny(MIXTRAL))


@dataclass(frozen=True)
class Work:
    """A dispatch: rows and their routing."""

    h_TH: Tensor
    routing: Routing
    layer: int = 1
    num_generated_rows: int = 0

    def dispatch_on(self, client: ExpertClient, timeout_s: float = TIMEOUT_S) -> Pending:
        """Rows on their way."""
        deadline_s = time.monotonic() + timeout_s
        return client.dispatch(
            self.layer, self.h_TH, self.routing, self.num_generated_rows, deadline_s
        )

    def run(self, client: ExpertClient, timeout_s: float = TIMEOUT_S) -> Tensor:
        """The combined rows."""
        return self.dispatch_on(client, timeout_s).result()


def work(num_rows: int, dtype: DtypeName = "float32", *, seed: int = 0, layer: int = 1) -> Work:
    """Random rows, routed at random."""
    rng = np.random.default_rng(seed)
    h_TH = torch.from_numpy(rng.standard_normal((num_rows, HIDDEN), dtype=np.float32))
    ids_TK = np.argsort(rng.random((num_rows, NUM_EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    weights_TK = rng.random((num_rows, TOP_K), dtype=np.float32)
    routing = Routing(np.ascontiguousarray(ids_TK), weights_TK)
    return Work(h_TH.to(TORCH_DTYPES[dtype]), routing, layer, num_rows // 2)


def to_expert(expert: int, num_rows: int = 1) -> Work:
    """Rows for one expert and its neighbour."""
    base = work(num_rows)
    ids = np.array([[expert, (expert + 1) % NUM_EXPERTS]] * num_rows, np.int32)
    return replace(base, routing=Routing(ids, base.routing.topk_weights_TK))


def local(checkpoint: Checkpoint, dtype: DtypeName = "float32") -> LocalExperts:
    return LocalExperts(ExpertBackend(loaded_store(checkpoint, dtype)))


@contextmanager
def remote(
    checkpoint: Checkpoint, entries: Iterable[ExpertWorkerEntry], dtype: DtypeName = "float32"
) -> Iterator[RemoteExperts]:
    """A client of these expert workers, in its first step."""
    experts = RemoteExperts(checkpoint.config, checkpoint.fingerprint, dtype)
    try:
        experts.update_map(map_of(checkpoint, entries), gateway=77)
        experts.begin_step(1)
        yield experts
    finally:
        experts.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_remote_equals_local_bit_by_bit(
    checkpoint: Checkpoint, dtype: DtypeName, num_workers: int
) -> None:
    """Any number of expert workers gives the bits of the colocated mode, for 0 to 100 rows."""
    here = local(checkpoint, dtype)
    shares = [f"{index}/{num_workers}" for index in range(num_workers)]
    with expert_servers(checkpoint, dtype, shares) as servers:
        entries = [entry_of(server.state, server.port) for server in servers]
        with remote(checkpoint, entries, dtype) as there:
            for seed, num_rows in enumerate((0, 1, 2, 7, 16, 100)):
                for layer in checkpoint.config.moe_layers:
                    todo = work(num_rows, dtype, seed=seed, layer=layer)
                    expected, actual = todo.run(here), todo.run(there)
                    assert expected.dtype == actual.dtype
                    assert torch.equal(expected, actual)


def test_a_row_does_not_depend_on_its_batch(checkpoint: Checkpoint) -> None:
    """A row alone gives the bits that it gives among 50 others."""
    todo = work(50)
    with (
        expert_servers(checkpoint, "float32", ["0/2", "1/2"]) as servers,
        remote(checkpoint, [entry_of(s.state, s.port) for s in servers]) as there,
    ):
        together = todo.run(there)
        ids, weights = todo.routing.topk_ids_TK, todo.routing.topk_weights_TK
        for row in (0, 17, 49):
            part = slice(row, row + 1)
            alone = Work(todo.h_TH[part], Routing(ids[part], weights[part])).run(there)
            assert torch.equal(together[part], alone)


def test_one_message_per_layer_and_expert_worker(checkpoint: Checkpoint) -> None:
    """An expert worker gets one message with its rows, each once, or none without rows."""
    with (
        faulty_server(loaded_store(checkpoint, "float32", "0-3"), right, "a") as a,
        faulty_server(loaded_store(checkpoint, "float32", "4-7"), right, "b") as b,
    ):
        with remote(checkpoint, [a.entry, b.entry]) as there:
            for layer in (0, 1, 2):
                replace(to_expert(1, num_rows=5), layer=layer).run(there)
            work(9).run(there)
        ids_TK = work(9).routing.topk_ids_TK
        rows_a, rows_b = (int((part).any(axis=1).sum()) for part in (ids_TK < 4, ids_TK >= 4))
        assert [(m.id.layer, m.hidden_states.shape[0]) for m in a.requests] == [
            (0, 5),
            (1, 5),
            (2, 5),
            (1, rows_a),
        ]
        assert [(m.id.layer, m.hidden_states.shape[0]) for m in b.requests] == [(1, rows_b)]
        assert [m.id.micro_batch for m in a.requests] == [0, 0, 0, 1]
        assert {m.id.gateway for m in a.requests} == {77}
        assert {(m.id.epoch, m.id.step, m.id.attempt) for m in a.requests} == {(1, 1, 0)}


def right(request: pb.ForwardRequest, reply: pb.ForwardResponse) -> list[pb.ForwardResponse]:
    """Answers as it should."""
    return [reply]


def silent(request: pb.ForwardRequest, reply: pb.ForwardResponse) -> list[pb.ForwardResponse]:
    """Does not answer."""
    return []


def changed(change: Callable[[pb.ForwardResponse], object]) -> Answer:
    """Changes the right reply."""

    def answer(
        request: pb.ForwardRequest, reply: pb.ForwardResponse
    ) -> Iterable[pb.ForwardResponse]:
        change(reply)
        return [reply]

    return answer


def corrupt_data(reply: pb.ForwardResponse) -> None:
    outputs = np.frombuffer(reply.outputs.data, np.float32).copy()
    outputs[3] = np.nan
    reply.outputs.data = outputs.tobytes()


WRONG_REPLIES: dict[str, tuple[Callable[[pb.ForwardResponse], object], str]] = {
    "no result": (lambda r: r.ClearField("outputs"), "result is missing"),
    "too few rows": (lambda r: r.outputs.shape.__setitem__(0, 2), "data has"),
    "other dtype": (lambda r: setattr(r.outputs, "dtype", pb.DTYPE_FLOAT16), "data has"),
    "short data": (lambda r: setattr(r.outputs, "data", r.outputs.data[:-4]), "data has"),
    "wrong CRC": (lambda r: setattr(r.outputs, "crc32", 5), "CRC-32"),
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
    checkpoint: Checkpoint, name: str
) -> None:
    """A reply that cannot be right is never used: the result is that of the other copy."""
    change, reason = WRONG_REPLIES[name]
    store = loaded_store(checkpoint, "float32")
    todo = to_expert(2)  # even experts prefer the first expert worker
    with (
        faulty_server(store, changed(change), "a") as bad,
        expert_server(store) as good,
        remote(checkpoint, [bad.entry, entry_of(good.state, good.port)]) as there,
    ):
        actual = todo.run(there)
        seen = {entry.worker_id: entry for entry in there.observations()}
    assert torch.equal(todo.run(local(checkpoint)), actual)
    assert len(bad.requests) == 1
    assert (seen["a"].calls, seen["a"].faults) == (0, 1)
    assert reason in seen["a"].last_fault
    assert (seen["worker"].calls, seen["worker"].faults) == (2, 0)
    assert good.state.load().errors == 0


def test_wrong_reply_without_another_copy(checkpoint: Checkpoint) -> None:
    """With one copy the failure names layer, experts, expert worker and reason."""
    store = loaded_store(checkpoint, "float32")
    with (
        faulty_server(store, changed(corrupt_data)) as bad,
        remote(checkpoint, [bad.entry]) as there,
    ):
        with pytest.raises(ExpertUnavailableError) as caught:
            to_expert(2).run(there)
        assert caught.value.missing == ((1, 2), (1, 3))
        assert f"expert worker faulty at 127.0.0.1:{bad.port}: outputs have" in str(caught.value)


def test_silent_expert_worker_costs_its_deadline_only(checkpoint: Checkpoint) -> None:
    """Without an answer the dispatch ends at its deadline; it never hangs."""
    with (
        faulty_server(loaded_store(checkpoint, "float32"), silent) as mute,
        remote(checkpoint, [mute.entry]) as there,
    ):
        started = time.monotonic()
        with pytest.raises(ExpertUnavailableError, match="no answer in time"):
            to_expert(2).run(there, timeout_s=0.3)
        assert 0.3 <= time.monotonic() - started < 2.0


def test_silent_expert_worker_with_another_copy(checkpoint: Checkpoint) -> None:
    """The other copy is asked within the deadline, and first of all from then on."""
    store = loaded_store(checkpoint, "float32")
    todo = to_expert(2)
    expected = todo.run(local(checkpoint))
    with (
        faulty_server(store, silent, "a") as mute,
        expert_server(store) as good,
        remote(checkpoint, [mute.entry, entry_of(good.state, good.port)]) as there,
    ):
        assert torch.equal(expected, todo.run(there, timeout_s=1.0))
        started = time.monotonic()
        assert torch.equal(expected, todo.run(there, timeout_s=20.0))
        assert time.monotonic() - started < 5.0
    assert len(mute.requests) == 1


def test_late_and_duplicate_replies_are_dropped(checkpoint: Checkpoint) -> None:
    """A reply after the time limit, and a second one, are counted and change nothing."""
    held: list[pb.ForwardResponse] = []

    def late_once(
        request: pb.ForwardRequest, reply: pb.ForwardResponse
    ) -> Iterable[pb.ForwardResponse]:
        held.append(reply)
        return [] if len(held) == 1 else [held[0], reply, reply]

    with (
        faulty_server(loaded_store(checkpoint, "float32"), late_once) as slow,
        remote(checkpoint, [slow.entry]) as there,
    ):
        with pytest.raises(ExpertUnavailableError):
            to_expert(4).run(there, timeout_s=0.2)
        todo = to_expert(2)
        assert torch.equal(todo.run(local(checkpoint)), todo.run(there))
        poll(lambda: there.num_late_replies == 2, timeout_s=TIMEOUT_S, what="two late replies")


def test_stopped_expert_worker_fails_calls_at_once(checkpoint: Checkpoint) -> None:
    """When an expert worker goes away, waiting calls fail at once; later ones are not sent."""
    gate = threading.Event()

    def hold(request: pb.ForwardRequest, reply: pb.ForwardResponse) -> Iterable[pb.ForwardResponse]:
        gate.wait(TIMEOUT_S)
        return []

    with (
        faulty_server(loaded_store(checkpoint, "float32"), hold) as server,
        remote(checkpoint, [server.entry]) as there,
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


def test_stream_opens_again(checkpoint: Checkpoint) -> None:
    """After a stream broke it is opened again by itself, and the expert worker is used again."""
    store = loaded_store(checkpoint, "float32")
    with faulty_server(store, right) as server, remote(checkpoint, [server.entry]) as there:
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


def test_uncovered_expert(checkpoint: Checkpoint) -> None:
    """An expert without a copy is named before anything is sent; others are served."""
    with faulty_server(loaded_store(checkpoint, "float32", "0-3"), right) as server:
        with (
            remote(checkpoint, []) as nothing,
            pytest.raises(ExpertUnavailableError, match="no expert worker is known"),
        ):
            to_expert(0).run(nothing)
        with remote(checkpoint, [server.entry]) as there:
            with pytest.raises(ExpertUnavailableError) as caught:
                to_expert(3).run(there)
            assert caught.value.missing == ((1, 4),)
            assert "no expert worker holds it" in str(caught.value)
            assert server.requests == []
            to_expert(0).run(there)


def test_refusals_lead_to_another_copy(checkpoint: Checkpoint) -> None:
    """Draining, stale and not-resident answers cost a retry; the first two end the use."""
    store = loaded_store(checkpoint, "float32")
    todo = to_expert(2)
    expected = todo.run(local(checkpoint))
    with expert_server(store, worker_id="a") as first, expert_server(store) as second:
        entries = [entry_of(first.state, first.port), entry_of(second.state, second.port)]
        first.state.refuse_calls()
        with remote(checkpoint, entries) as there:
            assert torch.equal(expected, todo.run(there))
            assert torch.equal(expected, todo.run(there))
        assert first.state.load().errors == 1
    with (
        expert_server(loaded_store(checkpoint, "float32", "0"), worker_id="a") as first,
        expert_server(store) as second,
    ):
        says_all = replace(
            entry_of(first.state, first.port), resident={1: tuple(range(NUM_EXPERTS))}
        )
        with remote(checkpoint, [says_all, entry_of(second.state, second.port)]) as there:
            assert torch.equal(expected, todo.run(there))
            seen = {entry.worker_id: entry.last_fault for entry in there.observations()}
            assert "layer 1 expert 2: not resident here" in seen["a"]
        stale = replace(entry_of(second.state, second.port), incarnation=9)
        with (
            remote(checkpoint, [stale]) as there,
            pytest.raises(ExpertUnavailableError, match="incarnation is 0x9"),
        ):
            todo.run(there)


def test_broken_row_harms_itself_only(checkpoint: Checkpoint) -> None:
    """A NaN in one row gives NaN there, and the right bits in every other row."""
    todo = work(6)
    expected = todo.run(local(checkpoint))
    todo.h_TH[2, 5] = torch.inf
    with (
        expert_servers(checkpoint, "float32", ["0/2", "1/2"]) as servers,
        remote(checkpoint, [entry_of(s.state, s.port) for s in servers]) as there,
    ):
        actual = todo.run(there)
    assert actual[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(expected[others], actual[others])


def test_row_credits_bound_what_is_in_flight(checkpoint: Checkpoint) -> None:
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
        faulty_server(store, count) as server,
        remote(checkpoint, [replace(server.entry, row_credits=4)]) as there,
    ):
        pending = [to_expert(expert, num_rows=2).dispatch_on(there) for expert in range(4)]
        poll(lambda: len(server.requests) == 1, timeout_s=TIMEOUT_S, what="the first arrives")
        stream = there._routes.streams[0]
        most = stream._rows_in_flight
        gate.release(4)
        for expert, call in enumerate(pending):
            expected = to_expert(expert, num_rows=2).run(local(checkpoint))
            assert torch.equal(expected, call.result())
        assert most == 4
        assert stream._rows_in_flight == 0
        with pytest.raises(ExpertUnavailableError, match="5 rows exceed its 4 row credits"):
            to_expert(1, num_rows=5).run(there)


def test_calls_waiting_for_credits_end_at_their_deadline(checkpoint: Checkpoint) -> None:
    """A call that never gets credits is an error at its deadline."""
    with (
        faulty_server(loaded_store(checkpoint, "float32"), silent) as server,
        remote(checkpoint, [replace(server.entry, row_credits=2)]) as there,
    ):
        first = to_expert(1, num_rows=2).dispatch_on(there, timeout_s=0.2)
        second = to_expert(3, num_rows=2).dispatch_on(there, timeout_s=0.2)
        for pending in (first, second):
            with pytest.raises(ExpertUnavailableError, match="no answer in time"):
                pending.result()
        assert len(server.requests) == 1


def test_map_is_pinned_for_a_step(checkpoint: Checkpoint) -> None:
    """A new map counts from the next step; streams that it drops are closed then."""
    store = loaded_store(checkpoint, "float32")
    todo = to_expert(2)
    with (
        faulty_server(store, right, "a") as a,
        faulty_server(store, right, "b") as b,
        remote(checkpoint, [a.entry]) as there,
    ):
        there.update_map(map_of(checkpoint, [b.entry]), gateway=77)
        todo.run(there)
        assert (len(a.requests), len(b.requests)) == (1, 0)
        there.begin_step(2)
        todo.run(there)
        assert (len(a.requests), len(b.requests)) == (1, 1)
        poll(lambda: not _threads("expert-stream-a"), timeout_s=5.0, what="the old one ends")


def test_same_life_keeps_its_stream(checkpoint: Checkpoint) -> None:
    """A map that names the same life again reuses its stream; another life gets a new one."""
    with (
        faulty_server(loaded_store(checkpoint, "float32"), right) as server,
        remote(checkpoint, [server.entry]) as there,
    ):
        before = there._routes.streams
        there.update_map(map_of(checkpoint, [server.entry]))
        assert there._routes.streams == before
        there.update_map(map_of(checkpoint, [replace(server.entry, incarnation=8)]))
        assert there._routes.streams != before


def test_observations_are_news_only(checkpoint: Checkpoint) -> None:
    """Counters add up what happened since the last look; nothing new, nothing said."""
    with (
        faulty_server(loaded_store(checkpoint, "float32"), right) as server,
        remote(checkpoint, [server.entry]) as there,
    ):
        to_expert(2, num_rows=3).run(there)
        (seen,) = there.observations()
        assert (seen.calls, seen.faults, seen.rows_out, seen.rows_back) == (1, 0, 3, 6)
        assert (seen.bytes_out, seen.bytes_back) == (3 * HIDDEN * 4, 6 * HIDDEN * 4)
        assert seen.round_trip_us > 0
        assert list(there.observations()) == []


def test_close_ends_threads_and_calls(checkpoint: Checkpoint) -> None:
    """close returns within a second, with expert workers that answer, hang or are not there."""
    store = loaded_store(checkpoint, "float32")
    nobody = ExpertWorkerEntry("ghost", "127.0.0.1:1", 5, {0: (0,)}, ROW_CREDITS)
    with (
        faulty_server(store, silent) as mute,
        remote(checkpoint, [mute.entry, nobody]) as there,
    ):
        pending = to_expert(2).dispatch_on(there)
        started = time.monotonic()
        there.close()
        assert time.monotonic() - started < 1.0
        assert _threads("expert-stream-") == []
        with pytest.raises(ExpertUnavailableError):
            pending.result()
        there.update_map(map_of(checkpoint, [mute.entry]))
        assert _threads("expert-stream-") == []


def _threads(prefix: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]
