"""What the runner asks of the state of a model's layers, whatever kind of layers it has.

A slot's state begins with a request, goes on with each committed step, and ends with the request.
What a step writes must not count before `commit`: an abandoned step is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from attention_worker.kv_cache import PagedKvCache
from attention_worker.model_states.paged_kv import AttentionInputs


class ModelState(Protocol):
    """State of all layers of a model, by request slot. Owner: the thread that runs the steps."""

    kv: PagedKvCache
    """Where keys and values are."""

    def begin(self, slot: int, num_cached: int) -> None:
        """A request has the slot; what its first `num_cached` tokens leave behind is there."""

    def append_blocks(
        self, slot: int, group: int, start: int, block_ids: Sequence[int], position: int
    ) -> None:
        """Continues a slot's block table in a KV group; a repeated append changes nothing.

        Args:
            slot: The request slot.
            group: The KV group.
            start: Index of the first block in the table.
            block_ids: Ids of blocks in the pool.
            position: Of the slot's next token to compute: what it does not see may be gone.

        Raises:
            ValueError: The blocks cannot be there; names slot and value.
        """

    def num_covered(self, slots_S: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens that the blocks of these slots hold, [S]."""
        ...

    def prepare(
        self,
        slots_S: npt.NDArray[np.int64],
        sequence_of_row_T: npt.NDArray[np.int32],
        positions_T: npt.NDArray[np.int32],
    ) -> AttentionInputs:
        """What the layers need for the rows of a step; their blocks must be there."""
        ...

    def commit(self, slots_S: npt.NDArray[np.int64], num_tokens_S: npt.NDArray[np.int64]) -> None:
        """This many more tokens of each slot are computed for good."""

    def remove(self, slot: int) -> None:
        """The request is gone."""

    def reset(self) -> None:
        """All requests are gone."""
