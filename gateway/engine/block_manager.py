"""Which KV blocks belong to which request, and which hold what an earlier one computed.

Owner: the scheduler, in the engine thread. All KV groups (see `expertmesh/kv_groups.py`) share one
pool; a request has a block table in each. A block is in block tables (several, if its content is
shared) or free. A free block keeps its content until it is taken for another one: that is the
prefix cache, and it costs no memory that requests could use.

    request's tokens          0 ........ 15 | 16 ....... 31 | 32 ..
    its table, sees all       block 7       | block 2       | block 9        (block_size 16)
    its table, window of 9    no block      | block 4       | block 5
    hash                      known, shared | known         | not full: none

Blocks behind the window of the next token are freed while the request runs. Free blocks are taken
oldest first: those without content, then those that were freed longest ago, of one request the
tail before the head, since a prefix is of use without what follows it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from expertmesh.kv_groups import KvGroups

NO_BLOCK = -1
"""In block tables: behind the window."""


class BlockAppend(NamedTuple):
    """Blocks that continue a block table."""

    group: int
    start: int
    """Index of the first of them; what is skipped before it has no block."""
    block_ids: tuple[int, ...]


class FoundPrefix(NamedTuple):
    """Blocks that hold the first tokens of a sequence."""

    num_blocks: int
    """Length of the tables."""
    tables: tuple[tuple[int, ...], ...]
    """Per group; NO_BLOCK for what the next token does not see."""


class _Tables:
    """Block tables of one request."""

    __slots__ = ("first_held", "num_covered", "seen_until", "tables")

    def __init__(self, tables: list[list[int]], first_held: list[int]) -> None:
        self.tables = tables
        """Per group."""
        self.first_held = first_held
        """Per group: index of the first block that is held; all after it are."""
        self.num_covered = 0
        """Tokens that every table has blocks for."""
        self.seen_until = 0
        """Up to the token at this position all held blocks are seen."""


class BlockManager:
    """A pool of equal KV blocks.

    Args:
        num_blocks: Blocks in the pool, with ids from 0.
        groups: The KV groups that share it.
        max_step_tokens: Most tokens of a request that one step computes.
    """

    def __init__(self, num_blocks: int, groups: KvGroups, max_step_tokens: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool of {num_blocks} blocks: expected at least 1")
        self.num_blocks = num_blocks
        self.groups = groups
        self.block_size = groups.block_size
        self._max_step_tokens = max_step_tokens
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_users = [0] * num_blocks
        self._tables: dict[str, _Tables] = {}
        self._block_of: list[dict[bytes, int]] = [{} for _ in range(groups.num_groups)]
        self._name_of: dict[int, tuple[int, bytes]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that belong to nobody; some of them have content that can be used again."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks in block tables, shared ones counted once."""
        return self.num_blocks - len(self._free)

    @property
    def num_kept(self) -> int:
        """Blocks whose content can be found."""
        return len(self._name_of)

    def find(self, names: Sequence[bytes]) -> FoundPrefix:
        """Blocks with the content of the first names, for as many of them as can be used.

        A prefix can be used if every group has all of its blocks that the token after it sees.
        """
        groups, length = range(self.groups.num_groups), len(names)
        for group in self.groups.whole:
            length = self._num_leading(group, names[:length])
        length = self._within_windows(names, length)
        return FoundPrefix(length, tuple(self._found(group, names, length) for group in groups))

    def open(
        self, request_id: str, found: FoundPrefix, num_tokens: int, end: int, *, headroom: int = 0
    ) -> tuple[BlockAppend, ...] | None:
        """Makes the block tables of a request that has none.

        Groups that keep a sequence whole get all blocks that its tokens need, others those up to
        the end of the first step; there must be room for what they need later.

        Args:
            request_id: The request.
            found: Blocks to begin with, from `find`.
            num_tokens: Tokens of the request.
            end: Tokens that are computed, or will be by the first step.
            headroom: Blocks that must stay free.

        Returns:
            The tables; None if too few blocks are free, in which case nothing changed.
        """
        assert request_id not in self._tables, f"{request_id} has block tables"
        num_free = len(self._free) - headroom - self._num_revived(found)
        lengths = [self.groups.blocks_for(end)] * self.groups.num_groups
        for group in self.groups.whole:
            lengths[group] = self.groups.blocks_for(num_tokens)
        num_new = sum(lengths) - found.num_blocks * self.groups.num_groups
        first_held = [table.count(NO_BLOCK) for table in found.tables]
        later = self._num_lacking(num_tokens, lengths, first_held)
        if num_new + later > num_free:
            return None
        for block in self._blocks_in(found):
            self._num_users[block] += 1
            self._free.pop(block, None)
        tables = [list(table) for table in found.tables]
        for table, length in zip(tables, lengths, strict=True):
            table.extend(self._take() for _ in range(length - len(table)))
        self._tables[request_id] = self._measure(_Tables(tables, first_held))
        return tuple(
            BlockAppend(group, first, tuple(table[first:]))
            for group, (table, first) in enumerate(zip(tables, first_held, strict=True))
        )

    def grow(self, request_id: str, num_tokens: int) -> tuple[BlockAppend, ...] | None:
        """Extends the block tables of a request so that they hold `num_tokens` in all.

        Returns:
            What was appended (nothing if they were large enough); None if too few blocks are free,
            in which case nothing changed.
        """
        held = self._tables[request_id]
        if num_tokens <= held.num_covered:
            return ()
        num_blocks = self.groups.blocks_for(num_tokens)
        if sum(max(0, num_blocks - len(table)) for table in held.tables) > len(self._free):
            return None
        appended = tuple(
            self._extend(group, table, num_blocks)
            for group, table in enumerate(held.tables)
            if len(table) < num_blocks
        )
        self._measure(held)
        return appended

    def free_unseen(self, request_id: str, position: int) -> None:
        """Frees the blocks that the token at `position`, the next to compute, does not see."""
        held = self._tables[request_id]
        if position <= held.seen_until:
            return
        for group, table in enumerate(held.tables):
            first = self.groups.first_seen(group, position)
            for index in range(held.first_held[group], first):
                self._drop(table[index])
                table[index] = NO_BLOCK
            held.first_held[group] = first
        self._measure(held)

    def num_lacking(self, request_id: str, num_tokens: int) -> int:
        """Blocks that a request of this many tokens may still need at a time, beyond its own."""
        held = self._tables[request_id]
        return self._num_lacking(num_tokens, [len(table) for table in held.tables], held.first_held)

    def keep(self, request_id: str, index: int, name: bytes) -> None:
        """Names the content of the full blocks at an index of a request's tables, so that it can
        be found. None of them is behind a window yet.

        The first block with a content stays the one that is found.
        """
        for group, table in enumerate(self._tables[request_id].tables):
            block = table[index]
            if name not in self._block_of[group] and block not in self._name_of:
                self._block_of[group][name] = block
                self._name_of[block] = (group, name)

    def forget(self, names: Sequence[bytes]) -> None:
        """Takes names off all blocks: nobody finds this content any more."""
        for known in self._block_of:
            for name in names:
                block = known.pop(name, None)
                if block is None:
                    continue
                del self._name_of[block]
                if block in self._free:
                    self._free.move_to_end(block, last=False)

    def free(self, request_id: str) -> int:
        """Gives back all blocks of a request; returns how many there were."""
        held = self._tables.pop(request_id, None)
        if held is None:
            return 0
        num_freed = 0
        for group in (*self.groups.windowed, *self.groups.whole):
            blocks = held.tables[group][held.first_held[group] :]
            num_freed += len(blocks)
            for block in reversed(blocks):
                self._drop(block)
        return num_freed

    def table(self, request_id: str, group: int = 0) -> tuple[int, ...]:
        """Block table of a request in a group; empty for one without blocks."""
        held = self._tables.get(request_id)
        return tuple(held.tables[group]) if held else ()

    def held_by(self, request_id: str) -> set[int]:
        """Blocks of a request in all groups."""
        tables = range(self.groups.num_groups)
        return {b for group in tables for b in self.table(request_id, group)} - {NO_BLOCK}

    def check_integrity(self) -> None:
        """Raises AssertionError unless free blocks, tables and names agree with each other."""
        users: Counter[int] = Counter()
        for held in self._tables.values():
            blocks = self._check_tables(held)
            assert len(set(blocks)) == len(blocks), "a block is twice in a request's tables"
            users.update(blocks)
        assert self._num_users == [users[block] for block in range(self.num_blocks)]
        assert sorted([*self._free, *users]) == list(range(self.num_blocks)), (
            f"{len(self._free)} free and {len(users)} held blocks are not the {self.num_blocks} of "
            "the pool, each once"
        )
        names = {
            block: (group, name)
            for group, known in enumerate(self._block_of)
            for name, block in known.items()
        }
        assert names == self._name_of

    def _check_tables(self, held: _Tables) -> list[int]:
        """The blocks of a request."""
        assert held.num_covered == min(map(len, held.tables)) * self.block_size > 0
        assert all(
            self.groups.first_seen(group, held.seen_until) <= first
            for group, first in enumerate(held.first_held)
        )
        blocks = []
        for table, first in zip(held.tables, held.first_held, strict=True):
            assert table[:first] == [NO_BLOCK] * first
            blocks += table[first:]
        assert NO_BLOCK not in blocks
        return blocks

    def _measure(self, held: _Tables) -> _Tables:
        """Notes what the tables hold."""
        held.num_covered = min(map(len, held.tables)) * self.block_size
        held.seen_until = min(
            self.groups.last_to_see(group, first) for group, first in enumerate(held.first_held)
        )
        return held

    def _num_leading(self, group: int, names: Sequence[bytes]) -> int:
        """How many of the first names a group knows, without a gap."""
        known = self._block_of[group]
        return next((i for i, name in enumerate(names) if name not in known), len(names))

    def _within_windows(self, names: Sequence[bytes], length: int) -> int:
        """The longest prefix, within `length`, of which windows see only blocks that are there.

        A block that is seen and missing must come after the prefix, since shorter prefixes see no
        later ones. So each group goes back from the end, over a block once, until all agree.
        """
        there_from = dict.fromkeys(self.groups.windowed, length)
        agreed = -1
        while length != agreed:
            agreed = length
            for group, known in ((group, self._block_of[group]) for group in there_from):
                index = min(there_from[group], length)
                while index > self.groups.first_seen(group, length * self.block_size):
                    index -= 1
                    if names[index] not in known:
                        length = index
                there_from[group] = index
        return length

    def _found(self, group: int, names: Sequence[bytes], length: int) -> tuple[int, ...]:
        """A group's table for the first names, which are there as far as they are seen."""
        first = self.groups.first_seen(group, length * self.block_size)
        known = self._block_of[group]
        return (*[NO_BLOCK] * first, *(known[name] for name in names[first:length]))

    def _num_revived(self, found: FoundPrefix) -> int:
        """Blocks of a prefix that are free now."""
        return sum(self._num_users[block] == 0 for block in self._blocks_in(found))

    def _blocks_in(self, found: FoundPrefix) -> list[int]:
        return [block for table in found.tables for block in table if block != NO_BLOCK]

    def _num_lacking(
        self, num_tokens: int, lengths: Sequence[int], first_held: Sequence[int]
    ) -> int:
        most_blocks, max_step_tokens = self.groups.most_blocks, self._max_step_tokens
        return sum(
            max(0, most_blocks(group, num_tokens, max_step_tokens) - (length - first))
            for group, (length, first) in enumerate(zip(lengths, first_held, strict=True))
        )

    def _extend(self, group: int, table: list[int], num_blocks: int) -> BlockAppend:
        start = len(table)
        added = tuple([self._take() for _ in range(num_blocks - start)])
        table.extend(added)
        return BlockAppend(group, start, added)

    def _drop(self, block: int) -> None:
        """One user less."""
        self._num_users[block] -= 1
        if self._num_users[block] == 0:
            self._free[block] = None
            if block not in self._name_of:
                self._free.move_to_end(block, last=False)

    def _take(self) -> int:
        """The free block whose content is needed least."""
        block, _ = self._free.popitem(last=False)
        named = self._name_of.pop(block, None)
        if named is not None:
            group, name = named
            del self._block_of[group][name]
        self._num_users[block] = 1
        return block
