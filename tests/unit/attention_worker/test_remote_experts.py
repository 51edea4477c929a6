"""Remote experts: bit-equal with local ones, one message each, maps pinned for a step."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import ExpertUnavailableError
from expertmesh.model_config import DtypeName
from expertmesh.placement import ExpertWorkerEntry
from expertmesh_kernels.router import Routing
from tests.conftest import Models
from tests.support.expert_servers import (
    ROW_CREDITS,
    entry_of,
    expert_servers,
    faulty_server,
    loaded_store,
    map_of,
)
from tests.support.expert_work import (
    HIDDEN,
    NUM_EXPERTS,
    Work,
    local,
    remote,
    right,
    silent,
    threads,
    to_expert,
    work,
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
        with remote(checkpoint, entries, dtype, direct=True) as there:
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
        remote(checkpoint, [entry_of(s.state, s.port) for s in servers], direct=True) as there,
    ):
        together = todo.run(there)
        ids, weights = todo.routing.topk_ids_TK, todo.routing.topk_weights_TK
        for row in (0, 17, 49):
            part = slice(row, row + 1)
            routing = Routing.of(ids[part], weights[part], NUM_EXPERTS)
            alone = Work(todo.h_TH[part], routing).run(there)
            assert torch.equal(together[part], alone)


def test_one_message_per_layer_and_expert_worker(checkpoint: Checkpoint, direct: bool) -> None:
    """An expert worker gets one message with its rows, each once, or none without rows."""
    with (
        faulty_server(loaded_store(checkpoint, "float32", "0-3"), right, "a", direct=direct) as a,
        faulty_server(loaded_store(checkpoint, "float32", "4-7"), right, "b", direct=direct) as b,
    ):
        with remote(checkpoint, [a.entry, b.entry], direct=direct) as there:
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


def test_broken_row_harms_itself_only(checkpoint: Checkpoint) -> None:
    """A NaN in one row gives NaN there, and the right bits in every other row."""
    todo = work(6)
    expected = todo.run(local(checkpoint))
    todo.h_TH[2, 5] = torch.inf
    with (
        expert_servers(checkpoint, "float32", ["0/2", "1/2"]) as servers,
        remote(checkpoint, [entry_of(s.state, s.port) for s in servers], direct=True) as there,
    ):
        actual = todo.run(there)
    assert actual[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(expected[others], actual[others])


def test_map_is_pinned_for_a_step(checkpoint: Checkpoint, direct: bool) -> None:
    """A new map counts from the next step; streams that it drops are closed then."""
    store = loaded_store(checkpoint, "float32")
    todo = to_expert(2)
    with (
        faulty_server(store, right, "a", direct=direct) as a,
        faulty_server(store, right, "b", direct=direct) as b,
        remote(checkpoint, [a.entry], direct=direct) as there,
    ):
        there.update_map(map_of(checkpoint, [b.entry]), gateway=77)
        todo.run(there)
        assert (len(a.requests), len(b.requests)) == (1, 0)
        there.begin_step(2)
        todo.run(there)
        assert (len(a.requests), len(b.requests)) == (1, 1)
        poll(lambda: not threads("expert-stream-a"), timeout_s=5.0, what="the old one ends")


def test_same_life_keeps_its_stream(checkpoint: Checkpoint, direct: bool) -> None:
    """A map that names the same life again reuses its stream; another life gets a new one."""
    with (
        faulty_server(loaded_store(checkpoint, "float32"), right, direct=direct) as server,
        remote(checkpoint, [server.entry], direct=direct) as there,
    ):
        before = there._routes.streams
        there.update_map(map_of(checkpoint, [server.entry]))
        assert there._routes.streams == before
        there.update_map(map_of(checkpoint, [replace(server.entry, incarnation=8)]))
        assert there._routes.streams != before


def test_observations_are_news_only(checkpoint: Checkpoint, direct: bool) -> None:
    """Counters add up what happened since the last look; nothing new, nothing said."""
    with (
        faulty_server(loaded_store(checkpoint, "float32"), right, direct=direct) as server,
        remote(checkpoint, [server.entry], direct=direct) as there,
    ):
        to_expert(2, num_rows=3).run(there)
        (seen,) = there.observations()
        assert (seen.calls, seen.faults, seen.rows_out, seen.rows_back) == (1, 0, 3, 6)
        assert (seen.bytes_out, seen.bytes_back) == (3 * HIDDEN * 4, 6 * HIDDEN * 4)
        assert seen.round_trip_us > 0
        assert list(there.observations()) == []


def test_observations_outlive_the_expert_worker(checkpoint: Checkpoint, direct: bool) -> None:
    """What was seen of a life that the map names no more is told, and told once."""
    with (
        faulty_server(loaded_store(checkpoint, "float32"), right, direct=direct) as server,
        remote(checkpoint, [server.entry], direct=direct) as there,
    ):
        to_expert(2, num_rows=3).run(there)
        there.update_map(map_of(checkpoint, []))
        there.begin_step(2)
        (seen,) = there.observations()
        assert (seen.worker_id, seen.calls) == (server.entry.worker_id, 1)
        assert list(there.observations()) == []


def test_close_ends_threads_and_calls(checkpoint: Checkpoint, direct: bool) -> None:
    """close returns within a second, with expert workers that answer, hang or are not there."""
    store = loaded_store(checkpoint, "float32")
    nobody = ExpertWorkerEntry("ghost", "127.0.0.1:1", 5, {0: (0,)}, ROW_CREDITS)
    with (
        faulty_server(store, silent, direct=direct) as mute,
        remote(checkpoint, [mute.entry, nobody]) as there,
    ):
        pending = to_expert(2).dispatch_on(there)
        started = time.monotonic()
        there.close()
        assert time.monotonic() - started < 1.0
        assert threads("expert-stream-") == []
        with pytest.raises(ExpertUnavailableError):
            pending.result()
        there.update_map(map_of(checkpoint, [mute.entry]))
        assert threads("expert-stream-") == []
