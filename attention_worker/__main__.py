"""`python -m attention_worker --settings JSON`: serves until SIGTERM or the end of its parent."""

from __future__ import annotations

import argparse
import logging
import sys

from expertmesh.attention_settings import AttentionWorkerSettings
from expertmesh.cores import settle
from expertmesh.errors import StartupError
from expertmesh.logs import configure_logging
from expertmesh.processes import announce_failure, announce_ready
from expertmesh.quiet_gc import QuietGc, pause_while_starting
from expertmesh.stop_request import StopRequest, end_within

STOP_GRACE_S = 1.0
"""Time for the step in hand at the end; its result is of no use any more."""

_ENDING_S = 3.0  # for the rest of an orderly end

logger = logging.getLogger("attention_worker")


def main(argv: list[str]) -> int:
    """Runs an attention worker; returns its exit code."""
    stopping = StopRequest()
    stopping.listen()
    parser = argparse.ArgumentParser(prog="attention_worker", description=__doc__)
    parser.add_argument("--settings", required=True, help="AttentionWorkerSettings as JSON")
    try:
        settings = AttentionWorkerSettings.from_json(parser.parse_args(argv).settings)
        _serve(settings, stopping)
    except StartupError as error:
        announce_failure(error)
        return error.exit_code
    return 0


def _serve(settings: AttentionWorkerSettings, stopping: StopRequest) -> None:
    configure_logging(settings.log, "attention worker")
    pause_while_starting()
    share = settle(settings.threads, settings.cores)
    # Numba and torch come now, after settings were checked.
    from expertmesh_kernels.compile_elsewhere import compile_elsewhere, end_of_start

    if settings.device == "cpu":
        arguments = ["--settings", settings.to_json()]
        compile_elsewhere("attention_worker.compile", arguments, lambda: stopping.made)
    from attention_worker.worker import build_worker

    worker = build_worker(settings)
    end_of_start()
    stopping.orderly()
    worker.server.start()
    description = worker.description
    logger.info(
        "serving %s (%s) with %d KV blocks of %d tokens on %s, %s",
        description.model.name,
        "experts inside" if description.colocated else "experts on expert workers",
        description.num_kv_blocks,
        description.kv_block_size,
        settings.socket_path,
        share,
    )
    announce_ready({"socket_path": settings.socket_path})
    with QuietGc(lambda: worker.server.num_steps):
        stopping.wait()  # ends with a signal or the parent
    end_within(STOP_GRACE_S + _ENDING_S)
    worker.stop(STOP_GRACE_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
