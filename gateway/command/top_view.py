"""What `expertmesh top` shows of an event of /v1/moe/stream: numbers, expert workers, alerts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Json = dict[str, Any]

_UNKNOWN = "-"
_STATE_STYLES = {"ready": "green", "draining": "yellow"}
_BAD = "bold red"
_SEVERITY_STYLES = {"critical": _BAD, "warning": "yellow"}
_BAR_CELLS = 20
_KIB, _MIB = 2**10, 2**20


def overview(url: str, event: Json) -> RenderableType:
    """All of it.

    Args:
        url: Whose it is.
        event: One of /v1/moe/stream.
    """
    return Group(
        _head(url, event),
        _numbers(event),
        Text(),
        _workers(event["workers"], event["straggler"]),
        *_alerts(event["alerts"]),
    )


def _head(url: str, event: Json) -> Text:
    text = Text(f"ExpertMesh {url}  ")
    text.append("ready" if event["ready"] else "not ready", "green" if event["ready"] else _BAD)
    text.append(f"  up {_span(event['uptime_s'])}  last {event['window_s']:.0f} s")
    if event["message"]:
        text.append(f"  {event['message']}")
    return text


def _numbers(event: Json) -> Table:
    table = Table.grid(padding=(0, 3))
    throughput, queue, kv = event["throughput"], event["queue"], event["kv"]
    table.add_row(
        f"tokens/s  {throughput['generation_tokens_per_s']:.1f} out",
        f"{throughput['prompt_tokens_per_s']:.1f} in",
        f"requests/s  {throughput['requests_per_s']:.2f}",
        f"failed/s  {throughput['failed_requests_per_s']:.2f}",
        f"steps/s  {throughput['steps_per_s']:.1f}",
    )
    table.add_row(
        f"requests  {queue['running']} running",
        f"{queue['waiting']} waiting",
        Text("KV  ").append(_bar(kv["usage"])).append(f" {100 * kv['usage']:.0f} %"),
        f"{kv['blocks_used']} of {kv['blocks_total']} blocks",
        f"map {event['epoch']}",
    )
    for name, key in (("first token", "ttft_s"), ("between tokens", "itl_s"), ("queue", "queue_s")):
        times = event[key]
        table.add_row(name, *(f"{p} {_ms(times[p])}" for p in ("p50", "p95", "p99")))
    return table


def _workers(workers: Sequence[Json], straggler: Json | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("expert worker", "state"):
        table.add_column(title)
    for title in (
        *("experts", "calls/s", "rows/s", "out", "back"),
        *("round trip", "compute", "network", "late", "faults"),
    ):
        table.add_column(title, justify="right")
    for worker in workers:
        table.add_row(*_worker_cells(worker), style=_BAD if worker["is_straggler"] else "")
    if not workers:
        table.add_row("experts are computed by attention workers")
    if straggler is not None:
        table.caption = f"straggler: {straggler['worker_id']}: {straggler['why']}"
        table.caption_style, table.caption_justify = _BAD, "left"
    return table


def _worker_cells(worker: Json) -> Iterator[RenderableType]:
    recent, state = worker["recent"], str(worker["state"])
    yield str(worker["worker_id"])
    yield Text(state, style=_STATE_STYLES.get(state, _BAD))
    yield str(worker["resident_experts"])
    yield f"{recent['calls_per_s']:.0f}"
    yield f"{recent['rows_out_per_s']:.0f}"
    yield _rate(recent["bytes_out_per_s"])
    yield _rate(recent["bytes_back_per_s"])
    for key in ("round_trip_ms", "compute_ms", "network_ms"):
        yield _UNKNOWN if recent[key] is None else f"{recent[key]:.2f} ms"
    yield str(recent["late_calls"])
    yield str(recent["faults"])


def _alerts(alerts: Sequence[Json]) -> Iterator[Text]:
    for alert in alerts:
        style = _SEVERITY_STYLES.get(alert["severity"], "yellow")
        yield Text(f"{alert['severity']}: {alert['message']}", style=style)


def _bar(share: float) -> str:
    filled = round(min(max(share, 0.0), 1.0) * _BAR_CELLS)
    return "█" * filled + "░" * (_BAR_CELLS - filled)


def _ms(seconds: float | None) -> str:
    return _UNKNOWN if seconds is None else f"{1000 * seconds:.1f} ms"


def _rate(bytes_per_s: float) -> str:
    if bytes_per_s >= _MIB:
        return f"{bytes_per_s / _MIB:.1f} MiB/s"
    return f"{bytes_per_s / _KIB:.1f} KiB/s"


def _span(seconds: float) -> str:
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}"
