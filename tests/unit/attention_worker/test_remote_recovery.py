"""An expert worker that answered wrongly and is right again is used again: no reply, and no loss of
replies, may end its use for longer than a moment while its gateway calls it ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch

from attention_worker import trust
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import ExpertUnavailableError
from expertmesh.v1 import expert_service_pb2 as pb
from tests.conftest import Models
from tests.support.expert_servers import faulty_server, loaded_store
from tests.support.expert_work import local, remote, work
from tests.support.processes import poll
from tests.support.tiny_checkpoints import MIXTRAL

CREDITS = 16
NUM_ROWS = 7
NUM_WRONG = 4
"""Calls that are answered wrongly: together they have more rows than there are credits."""
SHORT_S = 0.05


def _error(code: int) -> Callable[[pb.ForwardResponse], object]:
    return lambda reply: reply.error.MergeFrom(
        pb.ForwardError(code=code, message="no\nway")  # type: ignore[arg-type]
    )


def _lose_with_few_credits(reply: pb.ForwardResponse) -> None:
    reply.row_credits = 1
    reply.ClearField("id")


WRONG: dict[str, Callable[[pb.ForwardResponse], object] | None] = {
    "lost": None,
    "without id": lambda reply: reply.ClearField("id"),
    "of another layer": lambda reply: setattr(reply.id, "layer", 0),
    "few credits": lambda reply: setattr(reply, "row_credits", 1),
    "few credits and lost": _lose_with_few_credits,
    "of another life": lambda reply: setattr(reply, "incarnation", 3),
    "without result": lambda reply: reply.ClearField("outputs"),
    "wrong bytes": lambda reply: setattr(reply.outputs, "data", b"123"),
    "unknown error": _error(99),
    **{f"error {name.lower()}": _error(code) for name, code in pb.ForwardError.Code.items()},
}


@pytest.fixture(scope="module")
def checkpoint(models: Models) -> Checkpoint:
    """A tiny Mixtral: 3 layers, 8 experts, top-2."""
    return Checkpoint.open(models.tiny(MIXTRAL))


@pytest.fixture(params=[False, True], ids=["grpc", "direct"])
def direct(request: pytest.FixtureRequest) -> bool:
    """Whether expert workers offer direct connections."""
    return bool(request.param)


@pytest.mark.parametrize("name", WRONG)
def test_expert_worker_that_is_right_again_is_used_again(
    checkpoint: Checkpoint, direct: bool, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """After wrong replies of any kind, and as many as exhaust its credits, calls succeed again."""
    monkeypatch.setattr(trust, "REFUSED_S", 0.1)
    change = WRONG[name]
    todo = work(NUM_ROWS)
    num_left = NUM_WRONG

    def answer(
        request: pb.ForwardRequest, reply: pb.ForwardResponse
    ) -> Iterable[pb.ForwardResponse]:
        nonlocal num_left
        if num_left:
            num_left -= 1
            if change is None:
                return []
            change(reply)
        return [reply]

    with (
        faulty_server(loaded_store(checkpoint, "float32"), answer, direct=direct) as server,
        remote(checkpoint, [replace(server.entry, row_credits=CREDITS)], direct=direct) as there,
    ):
        results: list[torch.Tensor] = []

        def succeeds() -> bool:
            try:
                results.append(todo.run(there, SHORT_S if num_left else 1.0))
            except ExpertUnavailableError:
                return False
            return not num_left

        poll(succeeds, timeout_s=10, what="a call succeeds")
        assert torch.equal(todo.run(local(checkpoint)), results[-1])
        assert torch.equal(results[-1], todo.run(there))
