"""Block tables of all request slots in one KV group.

In a group with a window, blocks that the next token does not see belong to others by now, or were
never there: their entries stay, or are the null block, and nothing reads them.
Shape letters: T rows of a step, S sequences of a step, B blocks of the longest of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from expertmesh.kv_groups import KvGroups


class BlockTables:
    """Which blocks hold the tokens of each slot.

    Args:
        groups: All KV groups.
        group: Index of this one.
        num_slots: Request slots.
        max_blocks: Longest table.
        null_block: A block of the pool that belongs to nobody.
    """

    def __init__(
        self, groups: KvGroups, group: int, num_slots: int, max_blocks: int, null_block: int
    ) -> None:
        self._groups = groups
        self._group = group
        self._null_block = null_block
        self._table_SB: npt.NDArray[np.int32] = np.full(
            (num_slots, max_blocks), null_block, np.int32
        )
        self.num_blocks_S: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)
        """Length of each table."""

    def table(self, slot: int) -> npt.NDArray[np.int32]:
        """Blocks of a slot, in order."""
        return self._table_SB[slot, : self.num_blocks_S[slot]]

    def seen(self, slot: int, position: int) -> list[int]:
        """Blocks of a slot that the token at `position` sees, or later ones."""
        first = self._groups.first_seen(self._group, position)
        seen: list[int] = self.table(slot)[first:].tolist()
        return seen

    def has(self, slot: int, start: int, block_ids: Sequence[int]) -> bool:
        """True if a table ends with just these blocks, from `start` on."""
        return bool(self.table(slot)[start:].tolist() == list(block_ids))

    def append(self, slot: int, start: int, block_ids: Sequence[int], position: int) -> None:
        """Continues a table.

        Args:
            slot: The request slot.
            start: Index of the first block.
            block_ids: Ids of blocks in the pool.
            position: Of the next token to compute.

        Raises:
            ValueError: The blocks leave a gap that is seen, replace others, or are too many.
        """
        length, end = int(self.num_blocks_S[slot]), start + len(block_ids)
        skippable = 0 if length else self._groups.first_seen(self._group, position)
        if not length <= start <= length + skippable:
            raise ValueError(
                f"slot {slot}: KV blocks start at {start}, but the table has {length} and may lack "
                f"{skippable}"
            )
        max_blocks = self._table_SB.shape[1]
        if end > max_blocks:
            raise ValueError(
                f"slot {slot}: {end} KV blocks are more than max_model_len needs ({max_blocks})"
            )
        self._table_SB[slot, length:start] = self._null_block
        self._table_SB[slot, start:end] = block_ids
        self.num_blocks_S[slot] = end

    def gather(self, slots_S: npt.NDArray[np.int64], num_blocks: int) -> npt.NDArray[np.int32]:
        """The first blocks of some slots, [S, num_blocks]."""
        return self._table_SB[slots_S, :num_blocks]
