"""The mesh as JSON: what the live page and the commands show."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from gateway.mesh.mesh_status import ExpertWorkerStatus
from gateway.mesh.worker_report import KnownWorker, WorkCounters
from gateway.placement.state import ExpertKey
from gateway.sequence import DispatchStats
from gateway.telemetry.alerts import find_alerts
from gateway.telemetry.expert_use import ExpertUse, copies_LE, holders
from gateway.telemetry.latencies import Counts, quantile_s
from gateway.telemetry.stragglers import (
    WINDOW_S,
    CallTimes,
    Straggler,
    call_times,
    find_straggler,
)
from gateway.telemetry.telemetry import Telemetry, Window

Json = dict[str, Any]
"""Fit for orjson, with numpy arrays."""

RATES_WINDOW_S = 10.0
"""Of the overview and of the rates of expert workers."""
_NO_COUNTS = DispatchStats("")
_SHARES = (0.5, 0.95, 0.99)


def experts_view(telemetry: Telemetry, window_s: float | None) -> Json:
    """How each expert was used: body of /v1/moe/experts.

    Args:
        telemetry: Knows it.
        window_s: Over the last so many seconds; None: since the start.
    """
    sources = telemetry.sources
    use = ExpertUse.of(sources, telemetry.window(window_s))
    names, held_LER = holders(sources)
    return {
        "object": "moe.experts",
        "window_s": round(use.seconds, 3),
        "epoch": sources.mesh().epoch,
        "layers": use.experts.layers,
        "num_experts": use.experts.num_experts,
        "top_k": use.experts.top_k,
        "rows": _rounded(use.num_rows_L, 1),
        "tokens": use.rows_LE,
        "share": _rounded(use.share_LE, 6),
        "utilisation": _rounded(use.utilisation_LE, 4),
        "copies": copies_LE(sources),
        "workers": names,
        "holders": held_LER,
        "worker_tokens": use.pairs_LW,
        "imbalance": {
            "expert": _rounded(use.expert_imbalance_L, 4),
            "worker": _rounded(use.worker_imbalance_L, 4),
        },
        "entropy": _rounded(use.entropy_L, 4),
        "dead": use.dead_L,
        "hottest": use.hottest_LN(3),
    }


def workers_view(telemetry: Telemetry) -> Json:
    """What each expert worker does: body of /v1/moe/workers."""
    recent = telemetry.window(RATES_WINDOW_S)
    straggler = find_straggler(call_times(telemetry.window(WINDOW_S)))
    return {
        "object": "moe.workers",
        "window_s": round(recent.seconds, 3),
        "straggler": None if straggler is None else vars(straggler),
        "workers": _workers(telemetry, recent, straggler),
    }


def overview(telemetry: Telemetry) -> Json:
    """Everything at a glance: an event of /v1/moe/stream."""
    sources, window = telemetry.sources, telemetry.window(RATES_WINDOW_S)
    straggler = find_straggler(call_times(telemetry.window(WINDOW_S)))
    stats, mesh = sources.stats(), sources.mesh()
    done = window.end.requests.since(window.begin.requests)
    return {
        "object": "moe.overview",
        "time": round(time.time(), 3),
        "uptime_s": round(time.monotonic() - telemetry.born_s, 1),
        "window_s": round(window.seconds, 3),
        "ready": mesh.ready,
        "message": mesh.message,
        "throughput": {
            "prompt_tokens_per_s": _rate(done.prompt_tokens, window),
            "generation_tokens_per_s": _rate(done.generation_tokens, window),
            "requests_per_s": _rate(done.finished, window),
            "failed_requests_per_s": _rate(done.failed, window),
            "steps_per_s": _rate(window.end.num_steps - window.begin.num_steps, window),
        },
        "ttft_s": _quantiles(done.ttft),
        "itl_s": _quantiles(done.itl),
        "e2e_s": _quantiles(done.e2e),
        "queue_s": _quantiles(done.queue),
        "queue": {"running": stats.num_running, "waiting": stats.num_waiting},
        "kv": {
            "usage": round(stats.kv_cache_usage, 4),
            "blocks_used": stats.kv_blocks_used,
            "blocks_total": stats.kv_blocks_total,
        },
        "epoch": mesh.epoch,
        "uncovered_experts": sum(map(len, mesh.uncovered.values())),
        "straggler": None if straggler is None else vars(straggler),
        "workers": _workers(telemetry, window, straggler),
        "alerts": find_alerts(stats, mesh, straggler, sources.placement.report().moved),
    }


def placement_view(telemetry: Telemetry) -> Json:
    """Who holds what, and what is planned: body of /v1/moe/placement."""
    sources, report = telemetry.sources, telemetry.sources.placement.report()
    body: Json = report.to_json()
    if not report.experts.num_pairs:  # nothing is placed: expert workers hold what they hold
        held_LE = copies_LE(sources)
        body |= {
            "num_experts": held_LE.size,
            "num_covered": int((held_LE > 0).sum()),
            "num_copies": int(held_LE.sum()),
            "fewest_copies": int(held_LE.min()) if held_LE.size else 0,
            "workers": [_held(known) for known in sources.known_workers()],
        }
    return {
        "object": "moe.placement",
        "mode": "local" if sources.local_holders else "auto" if report.workers else "static",
        "layers": sources.experts.layers,
        "num_experts_per_layer": sources.experts.num_experts,
        **body,
    }


def _held(known: KnownWorker) -> Json:
    view = known.view
    layers: dict[str, list[int]] = {}
    for layer, expert in sorted(view.resident):
        layers.setdefault(str(layer), []).append(expert)
    return {
        "worker_id": view.worker_id,
        "node": view.node,
        "state": "leaving" if view.leaving else "ready",
        "expert_slots": view.num_slots,
        "resident": layers,
        "retiring": {},
        "wrong": {},
        "planned": layers,
    }


def _workers(telemetry: Telemetry, window: Window, straggler: Straggler | None) -> list[Json]:
    sources = telemetry.sources
    known = {one.address: one for one in sources.known_workers()}
    recent = {one.worker_id: one for one in call_times(window)}
    several = _keys_with_copies(list(known.values()))
    return [
        _worker(
            status,
            known.get(status.address),
            window.end.dispatch.get(status.worker_id, _NO_COUNTS),
            recent.get(status.worker_id, CallTimes("", _NO_COUNTS, window.seconds)),
            several,
        )
        | {"is_straggler": straggler is not None and straggler.worker_id == status.worker_id}
        for status in sources.mesh().workers
    ]


def _worker(
    status: ExpertWorkerStatus,
    known: KnownWorker | None,
    total: DispatchStats,
    recent: CallTimes,
    several: frozenset[ExpertKey],
) -> Json:
    resident = frozenset() if known is None else known.view.resident
    work = WorkCounters() if known is None else known.work
    return {
        "worker_id": status.worker_id,
        "address": status.address,
        "node": "" if known is None else known.view.node,
        "device": "" if known is None else known.device,
        "state": str(status.state),
        "message": status.message,
        "resident_experts": status.num_experts,
        "expert_slots": 0 if known is None else known.view.num_slots,
        "copies": len(resident & several),
        "sole_copies": len(resident - several),
        "cpu_s": round(work.cpu_s, 2),
        "rss_bytes": work.rss_bytes,
        "uptime_s": round(work.uptime_s, 1),
        "total": _counts(total),
        "last_fault": total.last_fault,
        "slowness": round(total.slowness, 2),
        "recent": _recent(recent),
    }


def _recent(calls: CallTimes) -> Json:
    """Rates and means of the window."""
    counts, seconds = calls.counts, calls.seconds
    is_known = counts.calls > 0
    return {
        "calls_per_s": round(counts.calls / seconds, 2),
        "rows_out_per_s": round(counts.rows_out / seconds, 1),
        "rows_back_per_s": round(counts.rows_back / seconds, 1),
        "bytes_out_per_s": round(counts.bytes_out / seconds),
        "bytes_back_per_s": round(counts.bytes_back / seconds),
        "round_trip_ms": round(calls.round_trip_s * 1e3, 3) if is_known else None,
        "compute_ms": round(calls.compute_s * 1e3, 3) if is_known else None,
        "network_ms": round(calls.network_s * 1e3, 3) if is_known else None,
        **{name: getattr(counts, name) for name in TROUBLES},
    }


TROUBLES = (
    *("faults", "late_calls", "hedges", "retries"),
    *("late_replies", "ejections", "damaged"),
)
"""Counts of calls that did not go as usual."""


def _counts(total: DispatchStats) -> Json:
    return {
        "calls": total.calls,
        "rows_out": total.rows_out,
        "rows_back": total.rows_back,
        "bytes_out": total.bytes_out,
        "bytes_back": total.bytes_back,
        "round_trip_s": round(total.round_trip_s, 6),
        "compute_s": round(total.compute_s, 6),
        **{name: getattr(total, name) for name in TROUBLES},
        "retries_by_cause": dict(total.retry_causes),
    }


def _keys_with_copies(known: list[KnownWorker]) -> frozenset[ExpertKey]:
    """Experts that several expert workers hold."""
    once: set[ExpertKey] = set()
    several: set[ExpertKey] = set()
    for worker in known:
        several |= once & worker.view.resident
        once |= worker.view.resident
    return frozenset(several)


def _rate(count: int, window: Window) -> float:
    return round(count / window.seconds, 3)


def _quantiles(counts: Counts) -> Json:
    """Of the window; null where nothing was measured."""
    found = {f"p{round(share * 100)}": quantile_s(counts, share) for share in _SHARES}
    return {name: None if value is None else round(value, 6) for name, value in found.items()}


def _rounded(values: np.ndarray[Any, np.dtype[np.floating[Any]]], digits: int) -> Any:
    return np.round(values, digits).astype(np.float32)
