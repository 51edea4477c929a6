"""Adds up how often the gates of all attention workers chose each expert."""

from __future__ import annotations

import logging
import threading

import numpy as np
import numpy.typing as npt

from expertmesh.v1 import attention_service_pb2 as pb

logger = logging.getLogger("gateway.attention")

RowCounts = npt.NDArray[np.int64]
"""[MoE layers, experts] rows for which each expert was chosen; the order of `moe_layers`."""


class GateTotals:
    """Totals since the gateway started. May be used from any thread.

    Args:
        num_layers: MoE layers.
        num_experts: Of each.
    """

    def __init__(self, num_layers: int = 0, num_experts: int = 0) -> None:
        self._lock = threading.Lock()
        self._rows_LE: RowCounts = np.zeros((num_layers, num_experts), np.int64)

    def add(self, response: pb.MembershipResponse) -> None:
        """Adds what an attention worker tells; each time it is what happened since the last."""
        if not response.gate_rows:
            return
        rows = np.frombuffer(response.gate_rows, "<u4")
        if rows.size != self._rows_LE.size:
            logger.error("counts of %d experts, expected %d", rows.size, self._rows_LE.size)
            return
        with self._lock:
            self._rows_LE += rows.reshape(self._rows_LE.shape)

    def snapshot(self) -> RowCounts:
        """Totals so far, as a copy."""
        with self._lock:
            return self._rows_LE.copy()
