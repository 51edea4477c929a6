"""One expert worker of a tiny model, and what of its calls compiled code leaves to Python."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from expert_worker.server import ExpertServer
from expertmesh.checkpoint import Checkpoint
from expertmesh.v1 import expert_service_pb2 as pb
from tests.conftest import Models
from tests.support.direct_calls import watch
from tests.support.expert_servers import expert_server, loaded_store
from tests.support.tiny_checkpoints import MIXTRAL


@pytest.fixture(scope="module")
def checkpoint(models: Models) -> Checkpoint:
    """A tiny Mixtral: 3 layers, 8 experts, top-2."""
    return Checkpoint.open(models.tiny(MIXTRAL))


@pytest.fixture
def server(checkpoint: Checkpoint) -> Iterator[ExpertServer]:
    """An expert worker with experts 0 to 3 of each layer."""
    with expert_server(loaded_store(checkpoint, "float32", "0-3")) as started:
        yield started


@pytest.fixture
def unusual(server: ExpertServer, monkeypatch: pytest.MonkeyPatch) -> list[pb.ForwardRequest]:
    """Calls that Python answers from now on."""
    return watch(server, monkeypatch)
