"""Expert workers: found, reached, and of the same model and protocol as the gateway would be."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator

from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import StartupError
from expertmesh.expert_plan import plan_experts
from expertmesh.settings import EngineSettings, MeshOptions, ModelOptions
from expertmesh.transport import Transport, make_transport
from expertmesh.v1 import expert_service_pb2 as pb
from gateway.doctor.finding import Finding, broken, fine, warning
from gateway.mesh.discovery import Endpoints
from gateway.mesh.discovery_setup import make_discovery
from gateway.mesh.expert_watcher import ExpertWatcher
from gateway.mesh.mesh_status import ExpertWorkerState
from gateway.mesh.worker_report import ServedIdentity, read_snapshot

_FOUND_WITHIN_S = 12.0
"""Longer than Kubernetes or a resolver is waited for, so that it is known why nothing came."""
_REACHED_WITHIN_S = 5.0
_HEARTBEAT_S = 1.0
_ONE_RELEASE = "start all with the same release, model, --dtype and --expert-dtype"

Answers = queue.SimpleQueue[tuple[str, pb.WatchResponse | str]]  # bounded: one try of each a second


def check_workers(
    mesh: MeshOptions, checkpoint: Checkpoint | None, model: ModelOptions, engine: EngineSettings
) -> Iterator[Finding]:
    """Whether a gateway with these settings could use the expert workers.

    Args:
        mesh: Says where they are.
        checkpoint: What the gateway would serve; None: they are reached, and not compared.
        model: How it would.
        engine: Its limits.
    """
    try:
        transport = make_transport(mesh.tls_files)
        endpoints, problem = _find(mesh)
    except StartupError as error:
        yield broken("expert workers", error.message, error.fix or "correct the settings")
        return
    if not endpoints:
        why = problem or f"nothing was found within {_FOUND_WITHIN_S:g} s"
        fix = "mend that, or correct --experts" if problem else "start some, or correct --experts"
        yield broken("expert workers", f"{mesh.experts}: {why}", fix)
        return
    served = None if checkpoint is None else _identity(checkpoint, model, engine)
    for address, answer in _ask(transport, [endpoint.address for endpoint in endpoints]).items():
        if isinstance(answer, str):
            fix = "start it, open its port, or compare the certificates of both ends"
            yield broken("expert workers", f"{address}: {answer}", fix)
        elif served is None or checkpoint is None:
            message = f"{answer.worker_id} at {address} answers, and serves {answer.model.name}"
            yield fine("expert workers", message)
        else:
            yield _compare(answer, address, served, checkpoint)


def _find(mesh: MeshOptions) -> tuple[Endpoints, str]:
    """What discovery tells first, and what it has to complain of. Raises StartupError."""
    told: queue.SimpleQueue[Endpoints] = queue.SimpleQueue()  # bounded by the seconds it runs
    discovery = make_discovery(mesh)
    discovery.start(told.put)
    try:
        return told.get(timeout=_FOUND_WITHIN_S), ""
    except queue.Empty:
        return (), discovery.report().problem
    finally:
        discovery.stop()


def _identity(
    checkpoint: Checkpoint, model: ModelOptions, engine: EngineSettings
) -> ServedIdentity:
    dtype = checkpoint.config.dtype if model.dtype == "auto" else model.dtype
    return ServedIdentity(
        *(checkpoint.name, checkpoint.fingerprint, dtype),
        expert_dtype=plan_experts(checkpoint, model.expert_dtype, dtype).name,
        max_step_tokens=engine.max_num_batched_tokens,
    )


def _ask(transport: Transport, addresses: list[str]) -> dict[str, pb.WatchResponse | str]:
    """The first snapshot of each, or why there is none in time."""
    answers: Answers = queue.SimpleQueue()
    watchers = [
        ExpertWatcher(transport, address, _HEARTBEAT_S, lambda *answer: answers.put(answer))
        for address in addresses
    ]
    for watcher in watchers:
        watcher.start()
    found: dict[str, pb.WatchResponse | str] = {}
    deadline_s = time.monotonic() + _REACHED_WITHIN_S
    try:
        while not all(
            isinstance(found.get(address, ""), pb.WatchResponse) for address in addresses
        ):
            address, answer = answers.get(timeout=max(0.0, deadline_s - time.monotonic()))
            found[address] = answer
    except queue.Empty:
        pass  # what is known by now is told
    finally:
        for watcher in watchers:
            watcher.stop()
        for watcher in watchers:
            watcher.join(_HEARTBEAT_S)
    silent = f"no answer within {_REACHED_WITHIN_S:g} s"
    return {address: found.get(address, silent) for address in addresses}


def _compare(
    snapshot: pb.WatchResponse, address: str, served: ServedIdentity, checkpoint: Checkpoint
) -> Finding:
    status = read_snapshot(snapshot, address, served, checkpoint.config).status
    message = f"{status.worker_id} at {address} {status.state}, {status.num_experts} experts"
    if status.state is ExpertWorkerState.READY:
        return fine("expert workers", message)
    if status.state is ExpertWorkerState.INCOMPATIBLE:
        return broken("expert workers", f"{message}: {status.message}", _ONE_RELEASE)
    return warning("expert workers", f"{message}: {status.message}", "nothing, if that is meant")
