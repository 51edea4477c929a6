"""Which copy of an expert is asked."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from attention_worker.membership import expert_map_from_proto
from expertmesh.checkpoint import Checkpoint
from gateway.attention.map_messages import map_message
from tests.conftest import Models
from tests.support.expert_servers import faulty_server, loaded_store, map_of
from tests.support.expert_work import local, remote, right, work
from tests.support.tiny_checkpoints import MIXTRAL


@pytest.fixture(scope="module")
def checkpoint(models: Models) -> Checkpoint:
    """A tiny Mixtral: 3 layers, 8 experts, top-2."""
    return Checkpoint.open(models.tiny(MIXTRAL))


@pytest.fixture(params=[False, True], ids=["grpc", "direct"])
def direct(request: pytest.FixtureRequest) -> bool:
    """Whether expert workers offer direct connections."""
    return bool(request.param)


def test_who_is_leaving_is_asked_for_its_sole_copies_only(
    checkpoint: Checkpoint, direct: bool
) -> None:
    """A leaving expert worker gets rows of experts that nobody else holds; bits are the same."""
    todo = work(40)
    with (
        faulty_server(loaded_store(checkpoint, "float32"), right, "a", direct=direct) as a,
        faulty_server(loaded_store(checkpoint, "float32", "0-5"), right, "b", direct=direct) as b,
    ):
        entries = [replace(a.entry, leaving=True), b.entry]
        with remote(checkpoint, entries, direct=direct) as there:
            assert torch.equal(todo.run(local(checkpoint)), todo.run(there))
        asked = {expert for call in a.requests for expert in memoryview(call.expert_ids).cast("I")}
        assert asked == {6, 7}
        update = map_message(map_of(checkpoint, entries), 77).expert_map
        told = expert_map_from_proto(update, checkpoint.config)
        assert told.workers == tuple(entries)
        assert told.choice[1].tolist() == [1] * 6 + [0] * 2


def test_compiled_code_and_python_choose_alike(checkpoint: Checkpoint) -> None:
    """Each expert worker is asked for the same rows and experts, and the busiest for few."""
    todo, shares = work(9), ("0-5", "2-7", "all")
    asked: list[list[tuple[bytes, bytes]]] = []
    for direct in (False, True):
        with ExitStack() as stack:
            servers = [
                stack.enter_context(
                    faulty_server(
                        loaded_store(checkpoint, "float32", share), right, f"{at}", direct=direct
                    )
                )
                for at, share in enumerate(shares)
            ]
            entries = [server.entry for server in servers]
            there = stack.enter_context(remote(checkpoint, entries, direct=direct))
            assert torch.equal(todo.run(local(checkpoint)), todo.run(there))
            calls = [server.requests[0] for server in servers]
            asked.append([(call.row_offsets, call.expert_ids) for call in calls])
    assert asked[0] == asked[1]
    experts = [set(memoryview(expert_ids).cast("I")) for _, expert_ids in asked[0]]
    assert sorted(map(len, experts)) == [2, 3, 3]
    assert set.union(*experts) == set(range(8))
