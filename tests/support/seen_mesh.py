"""A mesh whose counters a test sets, as telemetry sees it: 2 MoE layers, 4 experts, top-2."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from expertmesh.placement import ExpertMap, ExpertWorkerEntry
from gateway.mesh.gate_totals import RowCounts
from gateway.mesh.mesh_status import ExpertWorkerState, ExpertWorkerStatus, MeshStatus
from gateway.mesh.worker_report import KnownWorker, WorkCounters
from gateway.placement.state import WorkerView
from gateway.sequence import DispatchStats, EngineStats
from gateway.telemetry.devices import DeviceUse
from gateway.telemetry.sources import ModelExperts, Sources

LAYERS, NUM_EXPERTS, TOP_K = (1, 3), 4, 2
HELD = {"w0": (0, 1, 2), "w1": (2, 3)}
"""Experts of both layers; expert 2 has two copies."""


class SeenMesh:
    """Two expert workers, ready, with nothing counted yet."""

    def __init__(self) -> None:
        self.rows_LE: RowCounts = np.zeros((len(LAYERS), NUM_EXPERTS), np.int64)
        self.pairs: dict[str, dict[int, int]] = {name: {} for name in HELD}
        self.stats = EngineStats(request_slots_total=4)
        self.mesh = MeshStatus(
            epoch=5,
            workers=tuple(
                ExpertWorkerStatus(
                    name, f"at-{name}", ExpertWorkerState.READY, num_experts=2 * len(experts)
                )
                for name, experts in HELD.items()
            ),
        )
        entries = tuple(
            ExpertWorkerEntry(name, f"at-{name}", 7, dict.fromkeys(LAYERS, experts))
            for name, experts in HELD.items()
        )
        self.expert_map = ExpertMap(5, LAYERS, NUM_EXPERTS, entries)

    def sources(self) -> Sources:
        """What telemetry reads."""
        return Sources(
            experts=ModelExperts(LAYERS, NUM_EXPERTS, TOP_K),
            gate_rows=lambda: self.rows_LE.copy(),
            expert_map=lambda: self.expert_map,
            known_workers=self._known,
            mesh=lambda: self.mesh,
            stats=lambda: self.stats,
        )

    def call(self, worker_id: str, **counts: float) -> None:
        """Adds to what was counted of an expert worker's calls."""
        calls = {one.worker_id: one for one in self.stats.dispatch}
        old = calls.get(worker_id, DispatchStats(worker_id))
        added = {name: getattr(old, name) + value for name, value in counts.items()}
        calls[worker_id] = replace(old, **added)  # type: ignore[arg-type]
        self.stats = replace(self.stats, dispatch=tuple(calls.values()))

    def _known(self) -> tuple[KnownWorker, ...]:
        return tuple(
            KnownWorker(
                f"at-{name}",
                WorkerView(
                    name,
                    7,
                    f"node-of-{name}",
                    num_slots=8,
                    resident=frozenset((layer, expert) for layer in LAYERS for expert in experts),
                ),
                {},
                WorkCounters(uptime_s=9.0, cpu_s=1.5, rss_bytes=1 << 20),
                layer_pairs=dict(self.pairs[name]),
                device="cpu",
            )
            for name, experts in HELD.items()
        )


class OneDevice:
    """A machine with a GPU that is half busy."""

    def read(self) -> tuple[DeviceUse, ...]:
        """It."""
        return (DeviceUse(0, "NVIDIA H200", 0.5, 3 << 30, 141 << 30),)
