"""`expertmesh placement`: who holds which expert, what the leader is about to move, and by hand."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any

from cyclopts import App, Parameter

placement_app = App(
    name="placement",
    help="Show where experts are, and have them moved. Needs an admin key (EXPERTMESH_ADMIN_KEY) "
    "where the server has one.",
    sort_key=6,
)

Json = dict[str, Any]
Url = Annotated[str, Parameter(help="Address of the HTTP API.")]
AsJson = Annotated[bool, Parameter(name="--json", negative="", help="What the server answers.")]
_URL = "http://127.0.0.1:8000"


@placement_app.command
def show(*, url: Url = _URL, as_json: AsJson = False) -> int:
    """Print which expert worker holds how many experts, and how evenly they are used."""
    report = _ask(url, "GET", "/admin/placement")
    return _print(report, as_json, _shown(report))


@placement_app.command
def plan(*, url: Url = _URL, as_json: AsJson = False) -> int:
    """Print which expert worker is to hold which experts, layer by layer."""
    report = _ask(url, "GET", "/admin/placement")
    return _print(report, as_json, _planned(report))


@placement_app.command
def diff(*, url: Url = _URL, as_json: AsJson = False) -> int:
    """Print what has to be loaded and unloaded until the plan is carried out."""
    report = _ask(url, "GET", "/admin/placement")
    return _print(report, as_json, _moves(report))


@placement_app.command
def rebalance(*, url: Url = _URL) -> int:
    """Have the leader look at the load now."""
    _ask(url, "POST", "/admin/placement/rebalance")
    sys.stdout.write("the leader looks at the load\n")
    return 0


@placement_app.command
def drain(worker_id: str, *, url: Url = _URL) -> int:
    """Have an expert worker hand over what it holds, and end.

    Parameters
    ----------
    worker_id
        Its name, as `placement show` prints it.
    """
    import urllib.parse

    _ask(url, "POST", f"/admin/workers/{urllib.parse.quote(worker_id, safe='')}/drain")
    sys.stdout.write(f"{worker_id} hands over and ends\n")
    return 0


def _ask(url: str, method: str, path: str) -> Json:
    from gateway.command.client_commands import ClientOptions, ask_json

    key = os.environ.get("EXPERTMESH_ADMIN_KEY")
    return ask_json(ClientOptions(url.rstrip("/"), api_key=key), method, path)


def _print(report: Json, as_json: bool, lines: list[str]) -> int:
    text = json.dumps(report) if as_json else "\n".join(lines)
    sys.stdout.write(f"{text}\n")
    return 0


def _shown(report: Json) -> list[str]:
    lines = [
        f"{report['num_covered']} of {report['num_experts']} experts covered, "
        f"{report['num_copies']} copies, {report['fewest_copies']} of each at least; "
        f"slowest expert worker at {report['imbalance']:.2f} of the mean",
        _leader(report),
        _row("expert worker", "node", "state", "resident", "planned", "slots"),
    ]
    lines += [
        _row(
            worker["worker_id"],
            worker["node"],
            worker["state"],
            _count(worker["resident"]),
            _count(worker["planned"]),
            worker["expert_slots"],
        )
        for worker in report["workers"]
    ]
    lines += [
        f"{worker['worker_id']} has wrong bytes of layer {layer}: {_ranges(experts)}"
        for worker in report["workers"]
        for layer, experts in worker["wrong"].items()
    ]
    return lines + [
        f"order: {order['worker_id']} is to {order['kind']} {order['num_experts']} experts"
        for order in report["orders"]
        if order["num_experts"]
    ]


def _row(name: str, node: str, state: str, *numbers: object) -> str:
    return f"{name:<28} {node:<20} {state:<8}" + "".join(f" {number:>8}" for number in numbers)


def _planned(report: Json) -> list[str]:
    lines = [_leader(report)]
    for worker in report["workers"]:
        lines.append(f"{worker['worker_id']}: {_count(worker['planned'])} experts")
        lines += [
            f"  layer {layer:>3}: {_ranges(experts)}"
            for layer, experts in worker["planned"].items()
        ]
    return lines


def _moves(report: Json) -> list[str]:
    made = report["plan"]
    if made is None or not made["moves"]:
        return [_leader(report), "nothing to move"]
    by_worker: dict[tuple[str, str, int], list[int]] = {}
    for move in made["moves"]:
        place = move["worker_id"], move["kind"], move["layer"]
        by_worker.setdefault(place, []).append(move["expert"])
    return [_leader(report), made["why"]] + [
        f"{worker}: {kind:<6} layer {layer:>3}: {_ranges(experts)}"
        for (worker, kind, layer), experts in sorted(by_worker.items())
    ]


def _leader(report: Json) -> str:
    if report["leader"]:
        return f"this gateway leads, with fencing token {report['token']}"
    return "this gateway does not lead: another one plans, or placement is static"


def _count(layers: dict[str, list[int]]) -> int:
    return sum(map(len, layers.values()))


def _ranges(experts: list[int]) -> str:
    """Ascending numbers such as 0-3, 6."""
    runs: list[list[int]] = []
    for expert in experts:
        if runs and expert == runs[-1][1] + 1:
            runs[-1][1] = expert
        else:
            runs.append([expert, expert])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
