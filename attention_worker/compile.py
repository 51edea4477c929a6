"""`python -m attention_worker.compile --settings JSON`: compiles what such a worker will need.

Loads a small model of zeros, runs every kernel once, and ends.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from expertmesh.checkpoint import Checkpoint
from expertmesh.cores import settle
from expertmesh.errors import StartupError
from expertmesh.logs import configure_logging
from expertmesh.processes import announce_failure, watch_lifeline
from expertmesh.settings import AttentionWorkerSettings
from expertmesh.stand_in import StandIn

_MAX_MODEL_LEN = 64
_MAX_NUM_SEQS = 2


def main(argv: list[str]) -> int:
    """Compiles; returns the exit code."""
    watch_lifeline(lambda: os._exit(0))
    parser = argparse.ArgumentParser(prog="attention_worker.compile", description=__doc__)
    parser.add_argument("--settings", required=True, help="AttentionWorkerSettings as JSON")
    try:
        _compile(AttentionWorkerSettings.from_json(parser.parse_args(argv).settings))
    except StartupError as error:
        announce_failure(error)
        return error.exit_code
    return 0


def _compile(settings: AttentionWorkerSettings) -> None:
    configure_logging(replace(settings.log, log_level="warning"), "compiler")
    settle(settings.threads, settings.cores)
    from attention_worker.worker import load_and_warm_up  # torch

    original = Checkpoint.open(Path(settings.model))
    load_and_warm_up(_smaller(settings), StandIn(original)).experts.close()


def _smaller(settings: AttentionWorkerSettings) -> AttentionWorkerSettings:
    """With little to remember: sizes that no kernel is compiled for."""
    engine = replace(
        settings.engine, max_num_seqs=_MAX_NUM_SEQS, max_num_batched_tokens=_MAX_MODEL_LEN,
        kv_cache_tokens=None,
    )  # fmt: skip
    asked = settings.max_model_len or _MAX_MODEL_LEN
    return replace(settings, max_model_len=min(asked, _MAX_MODEL_LEN), engine=engine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
