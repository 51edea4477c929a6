"""How often the gates chose each expert. T rows, K top-k, L successive MoE layers, E experts.

What counts are the rows of committed steps: a step that is abandoned and repeated counts once, and
a row that was sent to several expert workers counts once, since nothing is counted where rows are
sent. Rows of drafts that were not accepted count, since experts computed them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from expertmesh.model_config import ModelConfig

Choice = tuple[int, npt.NDArray[np.int32]]
"""Number of the first of successive MoE layers, and the experts that they chose, [L, T, K]."""


class GateCounts:
    """Rows for which each expert was chosen. The model thread adds; any other may take.

    Args:
        config: Which experts there are.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._slot_of = {layer: slot for slot, layer in enumerate(config.moe_layers)}
        self._num_experts = config.num_experts
        self._lock = threading.Lock()
        self._rows_LE = self._none()
        self._is_new = False

    def add(self, choices: Iterable[Choice]) -> None:
        """Adds what gates chose in a step, which is committed."""
        with self._lock:
            for layer, ids_LTK in choices:
                self._add(self._slot_of[layer], ids_LTK)

    def take(self) -> bytes:
        """Rows since the last time, uint32 little-endian [MoE layers, experts]; empty for none."""
        with self._lock:
            if not self._is_new:
                return b""
            rows_LE, self._rows_LE, self._is_new = self._rows_LE, self._none(), False
        return rows_LE.astype("<u4").tobytes()

    def _add(self, slot: int, ids_LTK: npt.NDArray[np.int32]) -> None:
        num_layers, num_experts = len(ids_LTK), self._num_experts
        place_LTK = ids_LTK + (np.arange(num_layers) * num_experts)[:, np.newaxis, np.newaxis]
        counts = np.bincount(place_LTK.ravel(), minlength=num_layers * num_experts)
        self._rows_LE[slot : slot + num_layers] += counts.reshape(num_layers, num_experts)
        self._is_new = True

    def _none(self) -> npt.NDArray[np.int64]:
        return np.zeros((len(self._slot_of), self._num_experts), np.int64)
