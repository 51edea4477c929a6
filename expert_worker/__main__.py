"""`python -m expert_worker MODEL`: serves experts until SIGTERM or the end of its parent."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import typing
from functools import partial
from importlib import import_module

from expert_worker.probes import Probes, probes
from expert_worker.selection import chosen_experts
from expertmesh.checkpoint import Checkpoint
from expertmesh.cores import settle
from expertmesh.descriptors import raise_descriptor_limit
from expertmesh.errors import SettingsError, StartupError
from expertmesh.logs import configure_logging
from expertmesh.model_tools.progress import NoProgress
from expertmesh.model_tools.resolve import resolve_model
from expertmesh.priority import run_behind
from expertmesh.processes import announce_failure, announce_ready
from expertmesh.quiet_gc import QuietGc, pause_while_starting
from expertmesh.settings import ExpertWorkerOptions, ExpertWorkerSettings, LogSettings, data_home
from expertmesh.stop_request import StopRequest, end_within
from expertmesh.tls_settings import warn_of_exposure

_ENDING_S = 3.0  # for the rest of an orderly end, after the drain

logger = logging.getLogger("expert_worker")


def main(argv: list[str]) -> int:
    """Runs an expert worker; returns its exit code."""
    stopping = StopRequest()
    stopping.listen()
    try:
        settings, metrics_port = parse_settings(argv)
        configure_logging(settings.log, settings.worker_id or "expert worker")
        raise_descriptor_limit()
        warn_of_exposure(settings.host, encrypted=settings.tls_files is not None)
        with probes(settings.health_host or settings.host, settings.health_port) as asked:
            _serve(settings, metrics_port, argv, stopping, asked)
    except StartupError as error:
        announce_failure(error)
        return error.exit_code
    return 0


def parse_settings(argv: list[str]) -> tuple[ExpertWorkerSettings, int | None]:
    """Settings and the port of /metrics; defaults come from the settings classes.

    Raises:
        SettingsError: A value is out of range.
    """
    parser = argparse.ArgumentParser(prog="expert_worker", description=__doc__)
    parser.add_argument("model", help="checkpoint folder, ORG/NAME, or demo")
    parser.add_argument("--metrics-port", type=int, help="port of /metrics; none by default")
    for kind in (ExpertWorkerOptions, LogSettings):
        for entry in dataclasses.fields(kind):
            flag = f"--{entry.name.replace('_', '-')}"
            reader = _reader(kind, entry.name)
            if reader is _truth:  # --flag alone, or --flag=false
                parser.add_argument(flag, type=reader, nargs="?", const=True, default=entry.default)
            else:
                parser.add_argument(flag, type=reader, default=entry.default)
    values = vars(parser.parse_args(argv))
    metrics_port: int | None = values.pop("metrics_port")
    if metrics_port is not None and not 0 <= metrics_port <= 65_535:
        raise SettingsError(f"metrics_port is {metrics_port}, expected 0 to 65535")
    log = {entry.name: values.pop(entry.name) for entry in dataclasses.fields(LogSettings)}
    return ExpertWorkerSettings.from_dict({**values, "log": log}), metrics_port


def _reader(kind: type, name: str) -> typing.Callable[[str], object]:
    """How the text of a flag becomes a value; choices are checked by the settings."""
    expected = typing.get_type_hints(kind)[name]
    if expected is bool:
        return _truth
    for number in (int, float):
        if expected is number or number in typing.get_args(expected):
            return number
    return str


def _truth(text: str) -> bool:
    """As manifests and the environment have it."""
    meant = {"true": True, "1": True, "false": False, "0": False}.get(text.lower())
    if meant is None:
        raise argparse.ArgumentTypeError(f"{text!r}, expected true or false")
    return meant


def _serve(
    settings: ExpertWorkerSettings,
    metrics_port: int | None,
    argv: list[str],
    stopping: StopRequest,
    asked: Probes,
) -> None:
    from expertmesh.transport import make_transport  # imports gRPC

    pause_while_starting()
    share = settle(settings.threads, settings.cores)
    checkpoint = Checkpoint.open(resolve_model(settings.model, data_home(), NoProgress()))
    chosen_experts(settings.experts, checkpoint.config, settings.expert_slots)  # or refused at once
    make_transport(settings.tls_files, serves=True)  # likewise
    # Numba and torch come now, after settings were checked.
    from expertmesh_kernels.compile_elsewhere import compile_elsewhere, end_of_start

    if settings.device == "cpu":
        compile_elsewhere("expert_worker.compile", argv, lambda: stopping.made)
    behind = partial(run_behind, settings.start_niceness)
    behind(lambda: import_module("expert_worker.worker"))
    from expert_worker.worker import ExpertWorker

    worker = ExpertWorker(
        settings, checkpoint, metrics_port, on_drain=stopping.make, on_ready=asked.set_ready
    )
    logger.info("kernels use %s", share)  # after what can be refused: an error is all that is said
    behind(worker.warm_up)
    worker.start()
    stopping.orderly()
    try:
        if behind(lambda: worker.load(stopping)):
            end_of_start()
            announce_ready({"port": worker.server.port, "worker_id": worker.worker_id})
            with QuietGc(lambda: worker.server.state.load().calls):
                stopping.wait()
    except StartupError:
        worker.server.state.begin_drain(0.0)  # nobody is to wait for what it holds already
        raise
    finally:
        end_within(worker.begin_drain() + _ENDING_S)
        worker.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
