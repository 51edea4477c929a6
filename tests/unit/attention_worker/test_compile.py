"""Compiling for an attention worker, with a small model that stands in for what it serves."""

from __future__ import annotations

from dataclasses import replace

from attention_worker.compile import compile_kernels
from expertmesh.attention_settings import AttentionWorkerSettings
from expertmesh.checkpoint import Checkpoint
from expertmesh.stand_in import StandIn
from tests.conftest import Models
from tests.support.tiny_checkpoints import MIXTRAL


def test_a_model_of_few_positions(models: Models) -> None:
    """Sequences are no longer than the model was trained for, or it would be refused."""
    original = Checkpoint.open(models.tiny(replace(MIXTRAL, max_positions=32)))
    compile_kernels(AttentionWorkerSettings(colocated=True), StandIn(original))
