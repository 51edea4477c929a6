"""What telemetry is read from: functions that any thread may call, and that return at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from expertmesh.model_config import ModelConfig
from expertmesh.placement import ExpertMap
from gateway.mesh.gate_totals import RowCounts
from gateway.mesh.mesh_status import MeshStatus
from gateway.mesh.worker_report import KnownWorker
from gateway.placement.operator import Operator, StaticPlacement
from gateway.sequence import EngineStats
from gateway.telemetry.latencies import RequestTotals


@dataclass(frozen=True)
class ModelExperts:
    """The experts of the model."""

    layers: tuple[int, ...] = ()
    """Numbers of the MoE layers, counting all layers."""
    num_experts: int = 0
    """Of each."""
    top_k: int = 0
    """Experts of each row."""

    @classmethod
    def of(cls, config: ModelConfig) -> ModelExperts:
        """Those of a model; none of a dense one."""
        return cls(config.moe_layers, config.num_experts, config.top_k)

    @property
    def shape(self) -> tuple[int, int]:
        """[MoE layers, experts]."""
        return len(self.layers), self.num_experts


def _no_rows() -> RowCounts:
    return np.zeros((0, 0), np.int64)


@dataclass(frozen=True)
class Sources:
    """By default nothing is there."""

    experts: ModelExperts = ModelExperts()
    local_holders: tuple[str, ...] = ()
    """Attention workers, if they hold the experts themselves."""
    gate_rows: Callable[[], RowCounts] = _no_rows
    expert_map: Callable[[], ExpertMap] = lambda: ExpertMap(0, (), 0)
    known_workers: Callable[[], tuple[KnownWorker, ...]] = tuple
    mesh: Callable[[], MeshStatus] = MeshStatus
    stats: Callable[[], EngineStats] = EngineStats
    children: Callable[[], Mapping[str, int]] = dict
    """Processes that the gateway started: name to process id."""
    requests: RequestTotals = field(default_factory=RequestTotals)
    placement: Operator = field(default_factory=StaticPlacement)
