"""Rows that take expert workers down: who has lost how many, and when that is enough.

Kernels give the same bits for a row wherever it is computed, so what ends one expert worker ends
the next one that is asked, until nobody is left. Rows that were on two expert workers when these
were lost are therefore sent to no other one: the step ends, and its gateway finds out whose they
are. One loss is nothing: that is what other copies are for.

Owner: the model thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attention_worker.calls import Call
from expertmesh.errors import ExpertMeshError

MOST_LOSSES = 2
"""Expert workers that rows may have been on when these were lost."""

Ints = npt.NDArray[np.int64]


class LethalRowsError(ExpertMeshError):
    """Rows of a micro-batch were on as many expert workers as may be lost with them.

    Args:
        layer: Of the dispatch.
        micro_batch: Its index.
        rows: In the micro-batch, ascending.
        detail: Which expert workers were lost, and how that was seen.
    """

    def __init__(self, layer: int, micro_batch: int, rows: Ints, detail: str) -> None:
        self.layer, self.micro_batch = layer, micro_batch
        self.rows, self.detail = rows, detail
        super().__init__(f"expert workers were lost with the same rows of layer {layer}: {detail}")


class LethalStepError(ExpertMeshError):
    """The same of a step, by request slot.

    Args:
        cause: What was seen.
        slots: Whose rows these are, ascending.
    """

    def __init__(self, cause: LethalRowsError, slots: Sequence[int]) -> None:
        self.layer, self.slots = cause.layer, tuple(slots)
        super().__init__(str(cause))


class Losses:
    """Expert workers that were lost with rows of one dispatch.

    Args:
        most: How many that have the same rows may be lost.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._rows_of: dict[int, Ints] = {}
        self._reasons: list[str] = []

    def add(self, call: Call, reason: str) -> None:
        """The expert worker that had the rows of a call was lost.

        Args:
            call: The call.
            reason: Who it was and how that was seen, for the log.

        Raises:
            LethalRowsError: These were as many as may be.
        """
        worker, rows_R = call.rows.worker, call.rows.row_ids_R
        self._rows_of[worker] = np.union1d(self._rows_of.get(worker, rows_R), rows_R)
        self._reasons.append(reason)
        num_lost_T = np.bincount(np.concatenate(list(self._rows_of.values())))
        rows_L = np.flatnonzero(num_lost_T >= self._most)
        if len(rows_L):
            layer, micro_batch = call.call_id.layer, call.call_id.micro_batch
            raise LethalRowsError(layer, micro_batch, rows_L, "; ".join(self._reasons))
