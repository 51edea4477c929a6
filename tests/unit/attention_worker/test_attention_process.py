"""`python -m attention_worker` as a child process: ready, described, answering, and gone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest

from expertmesh import PROTOCOL_REVISION
from expertmesh.attention_settings import AttentionWorkerSettings
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import StartupError
from expertmesh.processes import Child, spawn_module
from expertmesh.settings import EngineSettings
from expertmesh.v1 import attention_service_pb2 as pb
from expertmesh.v1 import attention_service_pb2_grpc as pb_grpc
from tests.support.tiny_checkpoints import MIXTRAL

if TYPE_CHECKING:
    from tests.conftest import Models

READY_S = 120.0
DEADLINE_S = 20.0


def _spawn(model_dir: Path, socket_path: Path, **changes: int | None) -> Child:
    values: dict[str, int | None] = {"max_num_seqs": 3, "kv_cache_tokens": 1600} | changes
    settings = AttentionWorkerSettings(
        model=str(model_dir),
        socket_path=str(socket_path),
        max_model_len=100,
        colocated=True,
        engine=EngineSettings(**values),  # type: ignore[arg-type]
    )
    return spawn_module("attention_worker", ["--settings", settings.to_json()], "attention worker")


def test_worker_serves_until_it_is_told_to_stop(models: Models, tmp_path: Path) -> None:
    """Describe has what was asked for, a step is answered, and SIGTERM ends it at once."""
    model_dir = models.tiny(MIXTRAL)
    child = _spawn(model_dir, tmp_path / "a.sock")
    try:
        child.wait_ready(READY_S)
        with grpc.insecure_channel(f"unix:{tmp_path / 'a.sock'}") as channel:
            stub = pb_grpc.AttentionServiceStub(channel)
            described = stub.Describe(pb.DescribeRequest(), timeout=DEADLINE_S)
            step = pb.StepRequest(
                step=1,
                new_requests=[
                    pb.NewRequest(
                        slot=2, token_ids=np.array([5, 6], "<i4").tobytes(), num_prompt_tokens=2
                    )
                ],
                scheduled=[
                    pb.ScheduledRequest(
                        slot=2,
                        num_tokens=2,
                        new_blocks=[pb.BlockAppend(block_ids=[99])],
                        sample=True,
                    )
                ],
            )
            (answer,) = stub.Run(iter([pb.RunRequest(step=step)]), timeout=DEADLINE_S)
        stopped_s = time.monotonic()
        child.terminate()
        assert child.wait(5.0)
        assert time.monotonic() - stopped_s < 5.0
    finally:
        child.stop(1.0)
    assert child.exit_code == 0
    assert described.model.fingerprint == Checkpoint.open(model_dir).fingerprint
    assert (described.num_kv_blocks, described.kv_block_size) == (100, 16)
    assert (described.num_request_slots, described.max_model_len) == (3, 100)
    assert described.protocol_revision == PROTOCOL_REVISION
    assert described.colocated
    assert len(described.numerics_fingerprint) == 16
    assert answer.step.status == pb.StepResponse.STATUS_DONE, answer.step.message
    assert [token.slot for token in answer.step.sampled] == [2]


def test_impossible_settings_are_told_to_the_parent(models: Models, tmp_path: Path) -> None:
    """A KV cache that is too small for one sequence ends the start with the numbers."""
    child = _spawn(models.tiny(MIXTRAL), tmp_path / "a.sock", kv_cache_tokens=64)
    try:
        with pytest.raises(StartupError, match=r"room for 64 tokens .*max_model_len=100"):
            child.wait_ready(READY_S)
        assert child.wait(5.0)
    finally:
        child.stop(1.0)
    assert child.exit_code == 2
