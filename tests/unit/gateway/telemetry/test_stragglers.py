"""Who is slow and why; who is merely busier is not; what else somebody must know."""

from __future__ import annotations

import pytest

from gateway.mesh.mesh_status import ExpertWorkerState, ExpertWorkerStatus, MeshStatus
from gateway.placement.report import MoveCounts
from gateway.sequence import EngineStats
from gateway.telemetry.alerts import find_alerts
from gateway.telemetry.stragglers import Straggler, call_times, find_straggler
from gateway.telemetry.telemetry import Telemetry
from tests.support.seen_mesh import SeenMesh

USUAL = {"calls": 100, "rows_back": 1000, "round_trip_s": 0.1, "compute_s": 0.05}
"""1 ms a call, half of it computing."""


def _found(**others: dict[str, float]) -> Straggler | None:
    """The straggler of a mesh with two usual expert workers and others."""
    seen = SeenMesh()
    seen.call("a", **USUAL, late_calls=50)  # before the window
    telemetry = Telemetry(seen.sources())
    for name in ("a", "b"):
        seen.call(name, **USUAL)
    for name, counts in others.items():
        seen.call(name, **counts)
    return find_straggler(call_times(telemetry.window(None)))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"round_trip_s": 1.0, "compute_s": 0.9}, "compute"),
        ({"round_trip_s": 1.0, "compute_s": 0.05}, "network"),
        ({"calls": 4, "rows_back": 40, "round_trip_s": 0.04, "compute_s": 0.03}, "compute"),
        ({"late_calls": 20}, "late"),
        ({"calls": 0, "rows_back": 0, "round_trip_s": 0.0, "late_calls": 5}, "late"),
    ],
)
def test_who_is_slow_is_named_with_the_reason(change: dict[str, float], part: str) -> None:
    """Computing, the way, or no answers at all."""
    straggler = _found(c=USUAL | change)
    assert straggler is not None
    assert (straggler.worker_id, straggler.part) == ("c", part)
    assert "ms" in straggler.why or "late" in straggler.why


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"round_trip_s": 0.19},  # not twice as long
        {"rows_back": 10_000, "round_trip_s": 1.0, "compute_s": 0.9},  # ten times the rows
        {"calls": 2, "rows_back": 20, "round_trip_s": 1.0},  # may be chance
        {"late_calls": 2},
        {"calls": 1000, "round_trip_s": 1.0, "late_calls": 20},  # of so many
    ],
)
def test_who_is_not_slow(change: dict[str, float]) -> None:
    """Busier ones, and what may be chance."""
    assert _found(c=USUAL | change) is None


def test_microseconds_are_no_trouble() -> None:
    """Three times nothing is nothing."""
    seen = SeenMesh()
    telemetry = Telemetry(seen.sources())
    for name, microseconds in (("a", 50), ("b", 150)):
        seen.call(name, calls=100, rows_back=100, round_trip_s=microseconds / 1e4)
    assert find_straggler(call_times(telemetry.window(None))) is None


def test_the_slowest_of_several() -> None:
    """One is named."""
    slow = USUAL | {"round_trip_s": 0.5}
    found = _found(c=slow, d=USUAL | {"round_trip_s": 2.0}, e=USUAL, f=USUAL)
    assert found is not None
    assert found.worker_id == "d"
    assert found.factor == pytest.approx(20)


def test_nobody_is_slow_alone() -> None:
    """There is nothing to compare with."""
    seen = SeenMesh()
    telemetry = Telemetry(seen.sources())
    seen.call("a", calls=10, rows_back=10, round_trip_s=100.0)
    assert find_straggler(call_times(telemetry.window(None))) is None


def test_alerts_name_the_one_it_is_about() -> None:
    """The gravest first."""
    workers = (
        ExpertWorkerStatus("w0", "at-w0", ExpertWorkerState.READY),
        ExpertWorkerStatus("", "at-w1", ExpertWorkerState.UNREACHABLE, "no answer"),
        ExpertWorkerStatus("w2", "at-w2", ExpertWorkerState.INCOMPATIBLE, "wrong model"),
    )
    mesh = MeshStatus(workers=workers, uncovered={1: (0, 2)}, ready=False)
    stats = EngineStats(
        num_waiting=9, request_slots_total=8, kv_blocks_used=99, kv_blocks_total=100
    )
    slow = Straggler("w0", "network", 3.0, "the cable")
    alerts = find_alerts(stats, mesh, slow, MoveCounts(failed=2))
    assert [(alert["code"], alert["worker_id"]) for alert in alerts] == [
        ("uncovered_experts", None),
        ("worker_unreachable", "at-w1"),
        ("worker_incompatible", "w2"),
        ("straggler", "w0"),
        ("long_queue", None),
        ("kv_cache_full", None),
        ("failed_moves", None),
    ]
    assert alerts[0]["severity"] == "critical"
    assert alerts[3]["message"] == "w0 is slow: the cable"


def test_a_quiet_mesh_has_no_alerts() -> None:
    """A full cache that nobody waits for is none; not being ready is one."""
    full = EngineStats(kv_blocks_used=1, kv_blocks_total=1)
    assert find_alerts(full, MeshStatus(), None, MoveCounts()) == []
    (alert,) = find_alerts(full, MeshStatus(ready=False, message="why"), None, MoveCounts())
    assert (alert["code"], alert["message"]) == ("not_ready", "why")
