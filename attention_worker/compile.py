"""`python -m attention_worker.compile --settings JSON`: compiles what such a worker will need.

Loads a small model of zeros, runs every kernel once, and ends.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from expertmesh.attention_settings import AttentionWorkerSettings
from expertmesh.checkpoint import Checkpoint
from expertmesh.compile_process import run_compiler
from expertmesh.model_config import ModelConfig
from expertmesh.stand_in import StandIn

_MAX_MODEL_LEN = 64
_MAX_NUM_SEQS = 2


def main(argv: list[str]) -> int:
    """Compiles; returns the exit code."""
    parser = argparse.ArgumentParser(prog="attention_worker.compile", description=__doc__)
    parser.add_argument("--settings", required=True, help="AttentionWorkerSettings as JSON")
    text = parser.parse_args(argv).settings
    return run_compiler(lambda: AttentionWorkerSettings.from_json(text), _compile)


def _compile(settings: AttentionWorkerSettings) -> None:
    compile_kernels(settings, StandIn(Checkpoint.open(Path(settings.model))))


def compile_kernels(settings: AttentionWorkerSettings, checkpoint: Checkpoint) -> None:
    """Runs every kernel once, with little room for keys and values.

    Args:
        settings: Of the worker.
        checkpoint: What it serves, or what stands in for it.
    """
    from attention_worker.worker import load_and_warm_up  # torch

    load_and_warm_up(_smaller(settings, checkpoint.config), checkpoint).experts.close()


def _smaller(settings: AttentionWorkerSettings, config: ModelConfig) -> AttentionWorkerSettings:
    """With little to remember: sizes that no kernel is compiled for."""
    engine = replace(
        settings.engine, max_num_seqs=_MAX_NUM_SEQS, max_num_batched_tokens=_MAX_MODEL_LEN,
        kv_cache_tokens=None,
    )  # fmt: skip
    asked = settings.max_model_len or _MAX_MODEL_LEN
    max_model_len = min(asked, _MAX_MODEL_LEN, config.max_position_embeddings)
    return replace(settings, max_model_len=max_model_len, engine=engine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
