"""State of layers that remember keys and values: block tables over a pool, one per KV group.

Owner: the thread that runs the steps. Block tables change when a step's deltas are applied, not
at commit: KV rows can be rewritten, so an abandoned step leaves nothing to undo here.
Shape letters: T rows of a step, S sequences of a step, B blocks of the longest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attention_worker.kv_cache import PagedKvCache
from attention_worker.model_states.block_tables import BlockTables
from expertmesh_kernels.decoder_layers import LayerPages, StepPlaces
from expertmesh_kernels.paged_attention import KvCache


class LayerInputs(NamedTuple):
    """Where a layer finds the keys and values of the rows of a step."""

    cache: KvCache
    block_tables_SB: npt.NDArray[np.int32]
    """Blocks of each sequence, in order; those behind the window may be any."""
    kv_slots_T: npt.NDArray[np.int64]
    """Where a row's own key and value go: block * block_size + offset."""


@dataclass(frozen=True)
class AttentionInputs:
    """Where the rows of a step find their keys and values."""

    places: StepPlaces
    caches: tuple[KvCache, ...]
    """By layer."""
    pages: LayerPages
    """The same, as kernels for several layers take them."""

    @property
    def positions_T(self) -> npt.NDArray[np.int32]:
        """Position of each row in its sequence."""
        return self.places.positions_T

    @property
    def sequence_of_row_T(self) -> npt.NDArray[np.int32]:
        """Row of a layer's `block_tables_SB`."""
        return self.places.sequence_of_row_T

    def of_layer(self, layer: int) -> LayerInputs:
        """What one layer needs."""
        group = self.pages.group_of_layer_L[layer]
        tables_SB, slots_T = self.places.block_tables_GSB[group], self.places.slots_GT[group]
        return LayerInputs(self.caches[layer], tables_SB, slots_T)


class PagedKvState:
    """Block tables of all request slots; a `ModelState`."""

    def __init__(self, kv: PagedKvCache, num_slots: int, max_model_len: int) -> None:
        self.kv = kv
        max_blocks = -(-max_model_len // kv.block_size)
        self._tables = tuple(
            BlockTables(kv.groups, group, num_slots, max_blocks, kv.null_block)
            for group in range(kv.groups.num_groups)
        )

    def begin(self, slot: int, num_cached: int) -> None:
        """A request without blocks; see ModelState."""
        self.remove(slot)

    def block_table(self, slot: int, group: int = 0) -> npt.NDArray[np.int32]:
        """Blocks of one slot in one group, in order."""
        return self._tables[group].table(slot)

    def append_blocks(
        self, slot: int, group: int, start: int, block_ids: Sequence[int], position: int
    ) -> None:
        """Continues a table; see ModelState.

        Raises:
            ValueError: The group is unknown, or a block is not in the pool or in the slot's tables
                already, or the blocks do not continue the table; names slot and value.
        """
        if group >= len(self._tables):
            raise ValueError(
                f"slot {slot}: KV group {group} is out of range: there are {len(self._tables)}"
            )
        if max(block_ids, default=0) >= self.kv.num_blocks:
            raise ValueError(
                f"slot {slot}: KV block {max(block_ids)} is out of range: "
                f"the pool has {self.kv.num_blocks} blocks"
            )
        tables = self._tables[group]
        if tables.has(slot, start, block_ids):
            return
        seen = chain.from_iterable(tables.seen(slot, position) for tables in self._tables)
        distinct = set(block_ids)
        if len(distinct) < len(block_ids) or not distinct.isdisjoint(seen):
            raise ValueError(f"slot {slot}: KV blocks {list(block_ids)} repeat a block")
        tables.append(slot, start, block_ids, position)

    def num_covered(self, slots_S: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens that every table of these slots has blocks for, [S]."""
        num_blocks_GS = np.stack([tables.num_blocks_S[slots_S] for tables in self._tables])
        num_covered_S: npt.NDArray[np.int64] = num_blocks_GS.min(axis=0) * self.kv.block_size
        return num_covered_S

    def prepare(
        self,
        slots_S: npt.NDArray[np.int64],
        sequence_of_row_T: npt.NDArray[np.int32],
        positions_T: npt.NDArray[np.int32],
    ) -> AttentionInputs:
        """Gathers what attention needs for the rows of a step; their blocks must be there."""
        size = self.kv.block_size
        used_blocks = int(positions_T.max()) // size + 1
        index_T, offset_T = np.divmod(positions_T, size)
        tables_GSB = np.stack([tables.gather(slots_S, used_blocks) for tables in self._tables])
        # In rows of groups, as kernels want them: NumPy would give the indexed axis first.
        slots_GT = tables_GSB[:, sequence_of_row_T, index_T].astype(np.int64, order="C")
        slots_GT *= size
        slots_GT += offset_T
        places = StepPlaces(tables_GSB, sequence_of_row_T, positions_T, slots_GT)
        return AttentionInputs(places, self.kv.layers, self.kv.pages)

    def commit(self, slots_S: npt.NDArray[np.int64], num_tokens_S: npt.NDArray[np.int64]) -> None:
        """Nothing: keys and values count as far as tokens do; see ModelState."""

    def remove(self, slot: int) -> None:
        """Forgets the slot's blocks."""
        for tables in self._tables:
            tables.num_blocks_S[slot] = 0

    def reset(self) -> None:
        """Forgets all blocks."""
        for tables in self._tables:
            tables.num_blocks_S[:] = 0
