"""Experts without any copy: a step waits for them, or goes on without them where that is allowed.

The degraded mode is what its operator asked for in so many words: results are other ones then. A
row goes without the experts that are missing, and the weights of its others are raised to the sum
that all of them had; a row without any gets zeros.

T tokens, K top-k.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)


class DroppedExperts:
    """What was left out; counts may be taken from any thread.

    Args:
        allowed: Whether anything may be.
    """

    def __init__(self, allowed: bool = False) -> None:
        self.allowed = allowed
        self._lock = threading.Lock()
        self._num_pairs = 0
        self._missing: set[tuple[int, int]] = set()
        self.rows: list[tuple[int, npt.NDArray[np.int64]]] = []
        """Micro-batch and rows that were hit, of the present step; of the model thread alone."""

    def drop(self, layer: int, experts: Sequence[int], num_pairs: int) -> None:
        """Counts (row, expert) pairs that are left out; each expert is named once in the log."""
        with self._lock:
            self._num_pairs += num_pairs
            new = [expert for expert in experts if (layer, expert) not in self._missing]
            self._missing.update((layer, expert) for expert in new)
        if new:
            logger.warning(
                "degraded: layer %d goes without experts %s, which nobody holds",
                layer,
                ", ".join(map(str, new)),
            )

    def note(self, micro_batch: int, is_out_TK: npt.NDArray[np.bool_]) -> None:
        """Notes the rows of a micro-batch of which slots were left out."""
        self.rows.append((micro_batch, np.flatnonzero(is_out_TK.any(axis=1))))

    def begin_step(self) -> None:
        """What was hit before belongs to another step."""
        self.rows.clear()

    def forget(self) -> None:
        """There is a new expert map: what is missing then is news."""
        with self._lock:
            self._missing.clear()

    def take(self) -> int:
        """Pairs that were left out since the last time."""
        with self._lock:
            num_pairs, self._num_pairs = self._num_pairs, 0
        return num_pairs


def without(
    topk_ids_TK: npt.NDArray[np.int32],
    topk_weights_TK: npt.NDArray[np.float32],
    experts: Collection[int],
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
    """[T, K] which slots are left out, and the weights of all: 0, or more than they were.

    Args:
        topk_ids_TK: Chosen experts.
        topk_weights_TK: Their weights.
        experts: Those that are left out.
    """
    is_out_TK = np.isin(topk_ids_TK, list(experts))
    kept_TK = np.where(is_out_TK, np.float32(0), topk_weights_TK)
    all_T, kept_T = topk_weights_TK.sum(axis=1), kept_TK.sum(axis=1)
    factor_T = np.divide(all_T, kept_T, out=np.ones_like(all_T), where=kept_T != 0)
    return is_out_TK, kept_TK * factor_T[:, np.newaxis]
