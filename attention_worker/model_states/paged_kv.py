"""State of models whose layers remember keys and values only: block tables over a KV pool.

Owner: the thread that runs the steps. Block tables change when a step's deltas are applied, not
at commit: KV rows can be rewritten, so an abandoned step leaves nothing to undo here.
Shape letters: T rows of a step, S sequences of a step, B blocks of the longest of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attention_worker.kv_cache import PagedKvCache
from expertmesh_kernels.paged_attention import KvCache


@dataclass(frozen=True)
class AttentionInputs:
    """Where the rows of a step find their keys and values."""

    positions_T: npt.NDArray[np.int32]
    sequence_of_row_T: npt.NDArray[np.int32]
    """Row of `block_tables_SB`."""
    block_tables_SB: npt.NDArray[np.int32]
    kv_slots_T: npt.NDArray[np.int64]
    """Where a row's own key and value go: block * block_size + offset."""
    caches: tuple[KvCache, ...]
    """Keys and values of each layer."""


class PagedKvState:
    """Block tables of all request slots."""

    def __init__(self, kv: PagedKvCache, num_slots: int, max_model_len: int) -> None:
        self.kv = kv
        self.max_blocks = -(-max_model_len // kv.block_size)
        self._block_tables: npt.NDArray[np.int32] = np.zeros((num_slots, self.max_blocks), np.int32)
        self._num_blocks: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)

    def num_blocks(self, slots_S: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Blocks in the tables of these slots, [S]."""
        return self._num_blocks[slots_S]

    def block_table(self, slot: int) -> npt.NDArray[np.int32]:
        """Blocks of one slot, in order."""
        return self._block_tables[slot, : self._num_blocks[slot]]

    def remove_request(self, slot: int) -> None:
        """Forgets the slot's blocks."""
        self._num_blocks[slot] = 0

    def reset(self) -> None:
        """Forgets all blocks."""
        self._num_blocks[:] = 0

    def append_blocks(self, slot: int, block_ids: npt.NDArray[np.int64]) -> None:
        """Appends blocks to a slot's table. A repeated append (the table ends with just these
        blocks) changes nothing.

        Raises:
            ValueError: A block is not in the pool or in the table already, or the table is full.
        """
        outside = block_ids[(block_ids < 0) | (block_ids >= self.kv.num_blocks)]
        if outside.size:
            raise ValueError(
                f"slot {slot}: KV block {outside[0]} is out of range: "
                f"the pool has {self.kv.num_blocks} blocks"
            )
        table = self.block_table(slot)
        if np.array_equal(table[-len(block_ids) :], block_ids):
            return
        known = block_ids[np.isin(block_ids, table)]
        if known.size or len(np.unique(block_ids)) != len(block_ids):
            raise ValueError(f"slot {slot}: KV blocks {block_ids.tolist()} repeat a block")
        start, end = len(table), len(table) + len(block_ids)
        if end > self.max_blocks:
            raise ValueError(
                f"slot {slot}: {end} KV blocks are more than max_model_len needs "
                f"({self.max_blocks})"
            )
        self._block_tables[slot, start:end] = block_ids
        self._num_blocks[slot] = end

    def prepare(
        self,
        slots_S: npt.NDArray[np.int64],
        sequence_of_row_T: npt.NDArray[np.int32],
        positions_T: npt.NDArray[np.int32],
    ) -> AttentionInputs:
        """Gathers what attention needs for the rows of a step; their blocks must be there."""
        size = self.kv.block_size
        used_blocks = int(positions_T.max()) // size + 1
        tables_SB = self._block_tables[slots_S, :used_blocks]
        block_of_row = tables_SB[sequence_of_row_T, positions_T // size].astype(np.int64)
        return AttentionInputs(
            positions_T=positions_T,
            sequence_of_row_T=sequence_of_row_T,
            block_tables_SB=tables_SB,
            kv_slots_T=block_of_row * size + positions_T % size,
            caches=self.kv.layers,
        )
