"""What somebody who looks after a mesh should know at once, with the one it is about."""

from __future__ import annotations

from typing import Literal

from gateway.mesh.mesh_status import ExpertWorkerState, MeshStatus
from gateway.placement.report import MoveCounts
from gateway.sequence import EngineStats
from gateway.telemetry.stragglers import Straggler

Alert = dict[str, str | None]
"""`severity`, `code`, `message`, and `worker_id`, which may be null."""

_FULL = 0.95
"""Share of the KV blocks in use from which new requests may have to wait."""


def find_alerts(
    stats: EngineStats, mesh: MeshStatus, straggler: Straggler | None, moved: MoveCounts
) -> list[Alert]:
    """All of the moment, the gravest first.

    Args:
        stats: Load of the engines.
        mesh: The expert workers.
        straggler: The slow one, if there is one.
        moved: What became of orders to move experts.
    """
    alerts: list[Alert] = []
    uncovered = sum(map(len, mesh.uncovered.values()))
    if uncovered:
        alerts.append(_alert("critical", "uncovered_experts", f"{uncovered} experts have no copy"))
    if not mesh.ready and not uncovered:
        alerts.append(_alert("critical", "not_ready", mesh.message or "not ready"))
    for worker in mesh.workers:
        if worker.state in (ExpertWorkerState.UNREACHABLE, ExpertWorkerState.INCOMPATIBLE):
            name = worker.worker_id or worker.address
            message = f"{name} is {worker.state}: {worker.message}"
            alerts.append(_alert("warning", f"worker_{worker.state}", message, name))
    if straggler is not None:
        name = straggler.worker_id
        alerts.append(_alert("warning", "straggler", f"{name} is slow: {straggler.why}", name))
    if stats.num_waiting > stats.request_slots_total:
        message = f"{stats.num_waiting} requests wait, more than can run at a time"
        alerts.append(_alert("warning", "long_queue", message))
    if stats.kv_cache_usage > _FULL and stats.num_waiting:
        alerts.append(_alert("warning", "kv_cache_full", "requests wait for KV blocks"))
    if moved.failed:
        message = f"{moved.failed} experts could not be moved since the start"
        alerts.append(_alert("warning", "failed_moves", message))
    return alerts


def _alert(
    severity: Literal["critical", "warning"],
    code: str,
    message: str,
    worker_id: str | None = None,
) -> Alert:
    return {"severity": severity, "code": code, "message": message, "worker_id": worker_id}
