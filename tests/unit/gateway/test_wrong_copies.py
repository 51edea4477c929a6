"""A gateway that watches expert workers of which one has read other bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from expertmesh.checkpoint import Checkpoint
from expertmesh.expert_fingerprint import read_fingerprint
from expertmesh.placement import ExpertMap
from expertmesh.v1 import expert_service_pb2 as pb
from gateway.mesh.arbiter import CheckpointArbiter
from gateway.mesh.discovery import StaticDiscovery
from gateway.mesh.membership import Membership, ServedIdentity
from tests.support.changed_weights import with_changed_weight
from tests.support.processes import poll
from tests.support.tiny_folders import MIXTRAL_CONFIG, E, mixtral_tensors, save_folder
from tests.support.watch_server import WatchServer, snapshot

TENSOR = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
KEY = (1, 2)
WAIT_S = 10.0
ALL = {0: list(range(E)), 1: list(range(E))}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny Mixtral: 2 layers of 4 experts."""
    return save_folder(tmp_path / "model", MIXTRAL_CONFIG, mixtral_tensors())


@pytest.fixture
def changed(model: Path) -> Path:
    """The same with another weight in layer 1 expert 2."""
    return with_changed_weight(model, model.with_name("changed"), TENSOR, index=150)


def state(worker_id: str, model: Path, *, incarnation: int = 1) -> pb.WatchResponse:
    """Of an expert worker that has read all of a checkpoint."""
    checkpoint = Checkpoint.open(model)
    return snapshot(
        *(worker_id, checkpoint.fingerprint, ALL),
        incarnation=incarnation,
        bytes_of=lambda layer, expert: read_fingerprint(checkpoint, layer, expert),
    )


@contextmanager
def membership_of(
    model: Path, *servers: WatchServer, seen: list[ExpertMap] | None = None
) -> Iterator[Membership]:
    """What a gateway with this checkpoint makes of them; no thread of it is left afterwards.

    Args:
        model: Folder of the gateway.
        servers: Expert workers.
        seen: Takes all maps.
    """
    checkpoint = Checkpoint.open(model)
    membership = Membership(
        StaticDiscovery(server.address for server in servers),
        ServedIdentity("tiny", checkpoint.fingerprint, "float32", max_step_tokens=64),
        checkpoint.config,
        arbiter=CheckpointArbiter(checkpoint),
    )
    membership.subscribe((seen if seen is not None else []).append)
    membership.start()
    try:
        yield membership
    finally:
        membership.stop()
        checkpoint.close()
    assert "arbiter" not in [thread.name for thread in threading.enumerate()]


def holders(membership: Membership, key: tuple[int, int] = KEY) -> list[str]:
    """Ids of the workers that may be asked for an expert."""
    return holders_in(membership.expert_map, key)


def holders_in(newest: ExpertMap, key: tuple[int, int] = KEY) -> list[str]:
    """The same, by a map."""
    return [newest.workers[index].worker_id for index in newest.holders.get(key, ())]


def test_a_changed_weight_is_never_used(model: Path, changed: Path) -> None:
    """The wrong copy is in no map beside another; all else of that worker is used."""
    maps: list[ExpertMap] = []
    with ExitStack() as stack:
        folders = (model, changed, model)
        servers = [
            stack.enter_context(WatchServer(state(f"w{i}", folder)))
            for i, folder in enumerate(folders)
        ]
        membership = stack.enter_context(membership_of(model, *servers, seen=maps))
        poll(
            lambda: membership.status().num_wrong_copies == 1, timeout_s=WAIT_S, what="it is found"
        )
        poll(lambda: holders(membership) == ["w0", "w2"], timeout_s=WAIT_S, what="two copies")
        assert holders(membership, (1, 1)) == ["w0", "w1", "w2"]
        status = {worker.worker_id: worker for worker in membership.status().workers}
        assert "layer 1 expert 2 with other bytes" in status["w1"].message
        assert [status[name].message for name in ("w0", "w2")] == ["", ""]
        known = {worker.view.worker_id: worker.view for worker in membership.known_workers()}
        assert known["w1"].wrong == {KEY}
    assert [names for names in map(holders_in, maps) if "w1" in names and len(names) > 1] == []


def test_a_worker_that_comes_back_with_another_weight(model: Path, changed: Path) -> None:
    """It is alone, so its expert is missing rather than wrong; with the right files it is back."""
    with WatchServer(state("w0", model)) as server, membership_of(model, server) as membership:
        poll(lambda: holders(membership) == ["w0"], timeout_s=WAIT_S, what="it is used")
        server.change(state("w0", changed, incarnation=2))
        poll(lambda: membership.status().uncovered == {1: (2,)}, timeout_s=WAIT_S, what="gone")
        poll(
            lambda: membership.status().num_wrong_copies == 1, timeout_s=WAIT_S, what="it is found"
        )
        assert membership.status().uncovered == {1: (2,)}
        server.change(state("w0", model, incarnation=3))
        poll(lambda: holders(membership) == ["w0"], timeout_s=WAIT_S, what="it is used again")


def test_a_gateway_whose_own_checkpoint_is_odd(
    model: Path, changed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so, and uses both."""
    third = with_changed_weight(model, model.with_name("third"), TENSOR, index=170)
    with (
        WatchServer(state("w0", model)) as first,
        WatchServer(state("w1", changed)) as second,
        membership_of(third, first, second) as membership,
    ):
        poll(lambda: holders(membership) == ["w0", "w1"], timeout_s=WAIT_S, what="both are used")
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert "layer 1 expert 2 differ" in line
    assert "the checkpoint of this gateway is like none of them" in line


def test_a_gateway_that_cannot_read_its_own_copy(
    model: Path, changed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says why, and uses what there is."""
    own = with_changed_weight(model, model.with_name("own"), TENSOR, index=170)
    with WatchServer(state("w0", model)) as server, membership_of(own, server) as membership:
        poll(lambda: holders(membership) == ["w0"], timeout_s=WAIT_S, what="it is used")
        with (own / "model.safetensors").open("r+b") as file:
            file.truncate(1000)
        server.change(state("w0", changed, incarnation=2))
        poll(
            lambda: any("cannot be read: " in r.getMessage() for r in caplog.records),
            timeout_s=WAIT_S,
            what="it says so",
        )
        poll(lambda: holders(membership) == ["w0"], timeout_s=WAIT_S, what="it is used again")
