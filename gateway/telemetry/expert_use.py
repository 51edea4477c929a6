"""How experts were used in a window. L MoE layers, E experts, W holders of experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gateway.telemetry.sources import ModelExperts, Sources
from gateway.telemetry.telemetry import Window

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ExpertUse:
    """Rows that the gates sent to each expert, and pairs that each expert worker computed."""

    experts: ModelExperts
    seconds: float
    """Length of the window."""
    rows_LE: npt.NDArray[np.int64]
    """Rows for which each expert was chosen."""
    workers: tuple[str, ...]
    """Expert workers in the expert map."""
    pairs_LW: npt.NDArray[np.int64]
    """(row, expert) pairs that each of them computed, for this gateway or others."""

    @classmethod
    def of(cls, sources: Sources, window: Window) -> ExpertUse:
        """The use of experts in a window."""
        rows_LE = window.end.gate_rows_LE - window.begin.gate_rows_LE
        workers = sources.expert_map().workers
        pairs_LW = np.zeros((len(sources.experts.layers), len(workers)), np.int64)
        for index, worker in enumerate(workers):
            life = worker.worker_id, worker.incarnation
            before = window.begin.pairs.get(life, {})
            for slot, layer in enumerate(sources.experts.layers):
                now = window.end.pairs.get(life, {}).get(layer, 0)
                # Less than before: counts of experts that were unloaded are gone.
                pairs_LW[slot, index] = max(0, now - before.get(layer, 0))
        names = tuple(worker.worker_id for worker in workers)
        return cls(sources.experts, window.seconds, rows_LE, names, pairs_LW)

    @cached_property
    def num_rows_L(self) -> npt.NDArray[np.float64]:
        """Rows that went through each layer."""
        num_rows_L: npt.NDArray[np.float64] = self.rows_LE.sum(axis=1) / max(1, self.experts.top_k)
        return num_rows_L

    @cached_property
    def share_LE(self) -> Floats:
        """Share of a layer's (row, expert) pairs that an expert had; 0 where there were none."""
        total_L1 = self.rows_LE.sum(axis=1, keepdims=True)
        share_LE: Floats = (self.rows_LE / np.maximum(total_L1, 1)).astype(np.float32)
        return share_LE

    @cached_property
    def utilisation_LE(self) -> Floats:
        """Load to fair load, rows * top_k / experts: 1 is fair, 0 is an expert nobody chose."""
        return self.share_LE * np.float32(self.experts.num_experts)

    @property
    def expert_imbalance_L(self) -> Floats:
        """Most loaded expert to the mean; 1 where there was no load."""
        return _imbalance(self.rows_LE)

    @property
    def worker_imbalance_L(self) -> Floats:
        """Most loaded expert worker to the mean; 1 where there was no load."""
        return _imbalance(self.pairs_LW)

    @cached_property
    def entropy_L(self) -> Floats:
        """Entropy of the shares to that of even ones, 0 to 1; 1 where there was no load."""
        if self.experts.num_experts < 2:
            return np.ones(len(self.rows_LE), np.float32)
        share_LE = np.where(self.share_LE > 0, self.share_LE, 1)
        entropy_L = -(share_LE * np.log(share_LE)).sum(axis=1) / np.log(self.experts.num_experts)
        return np.where(self.rows_LE.any(axis=1), entropy_L, 1).astype(np.float32)

    @property
    def dead_L(self) -> npt.NDArray[np.int64]:
        """Experts that no row chose, of layers with any load."""
        dead_L: npt.NDArray[np.int64] = (self.rows_LE == 0).sum(axis=1)
        return np.where(self.rows_LE.any(axis=1), dead_L, 0)

    def hottest_LN(self, count: int) -> npt.NDArray[np.int64]:
        """[L, at most count] the experts with most rows, the first one first."""
        order_LE = np.argsort(-self.rows_LE, axis=1, kind="stable")
        return np.ascontiguousarray(order_LE[:, :count])


def copies_LE(sources: Sources) -> npt.NDArray[np.int64]:
    """Usable copies of each expert."""
    copies: npt.NDArray[np.int64] = (holders(sources)[1] >= 0).sum(axis=2)
    return copies


def holders(sources: Sources) -> tuple[tuple[str, ...], npt.NDArray[np.int32]]:
    """Who can be asked for experts, and [L, E, R] which of them hold each one, -1 for nobody."""
    if local := sources.local_holders:
        indices_R = np.arange(len(local), dtype=np.int32)
        held_LER = np.broadcast_to(indices_R, (*sources.experts.shape, len(local)))
        return local, np.ascontiguousarray(held_LER)
    expert_map = sources.expert_map()
    return tuple(worker.worker_id for worker in expert_map.workers), expert_map.copies_SER


def _imbalance(load_LN: npt.NDArray[np.int64]) -> Floats:
    if not load_LN.shape[1]:
        return np.ones(len(load_LN), np.float32)
    mean_L = load_LN.mean(axis=1)
    most_L = load_LN.max(axis=1)
    ratio_L = np.divide(most_L, mean_L, out=np.ones_like(mean_L), where=mean_L > 0)
    imbalance_L: Floats = ratio_L.astype(np.float32)
    return imbalance_L
