"""What `expertmesh top` makes of an event."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from gateway.command.top_view import overview

Json = dict[str, Any]
QUANTILES: Json = {"p50": 0.0123, "p95": None, "p99": None}
RECENT: Json = {
    "window_s": 10.0,
    "calls_per_s": 120.0,
    "rows_out_per_s": 900.0,
    "rows_back_per_s": 1800.0,
    "bytes_out_per_s": 3.5 * 2**20,
    "bytes_back_per_s": 2048.0,
    "round_trip_ms": 31.25,
    "compute_ms": 0.5,
    "network_ms": 30.75,
    "late_calls": 7,
    "faults": 2,
}


def worker(name: str, state: str = "ready", **changes: object) -> Json:
    """One of the event."""
    found: Json = {"worker_id": name, "state": state, "resident_experts": 16, "recent": RECENT}
    return found | {"is_straggler": False} | changes


def shown(**changes: object) -> str:
    """The text for an event."""
    event: Json = {
        "uptime_s": 3725.0,
        "window_s": 10.0,
        "ready": True,
        "message": "",
        "throughput": {
            "prompt_tokens_per_s": 10.0,
            "generation_tokens_per_s": 55.5,
            "requests_per_s": 1.25,
            "failed_requests_per_s": 0.0,
            "steps_per_s": 30.0,
        },
        "ttft_s": QUANTILES,
        "itl_s": QUANTILES,
        "queue_s": QUANTILES,
        "queue": {"running": 3, "waiting": 4},
        "kv": {"usage": 0.25, "blocks_used": 512, "blocks_total": 2048},
        "epoch": 7,
        "workers": [],
        "straggler": None,
        "alerts": [],
    } | changes
    console = Console(width=160, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(overview("http://mesh:8000", event))
    return capture.get()


def test_numbers() -> None:
    """Of requests, of memory, of times; a dash for what is not known."""
    text = shown()
    for part in ("1:02:05", "55.5 out", "3 running", "4 waiting", "25 %", "p50 12.3 ms", "p95 -"):
        assert part in text
    assert "experts are computed by attention workers" in text


def test_expert_workers_and_who_is_slow() -> None:
    """A line each; the straggler is named with the reason."""
    workers = [worker("a"), worker("b", is_straggler=True), worker("c", "unreachable")]
    straggler = {"worker_id": "b", "why": "its calls take 12 times as long"}
    text = shown(workers=workers, straggler=straggler)
    assert "straggler: b: its calls take 12 times as long" in text
    for part in ("31.25 ms", "30.75 ms", "3.5 MiB/s", "2.0 KiB/s", "unreachable"):
        assert part in text
    unknown = dict.fromkeys(("round_trip_ms", "compute_ms", "network_ms"))
    assert "31.25" not in shown(workers=[worker("a", recent=RECENT | unknown)])


def test_alerts() -> None:
    """All of them."""
    alerts = [{"severity": "critical", "message": "3 experts have no usable copy"}]
    text = shown(alerts=alerts, ready=False, message="experts are missing")
    assert "critical: 3 experts have no usable copy" in text
    assert "not ready" in text
    assert "experts are missing" in text
