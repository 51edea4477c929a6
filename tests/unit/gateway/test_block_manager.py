"""KV block accounting: nothing leaks, nothing is used twice, whatever is asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from expertmesh.kv_groups import KvGroups
from gateway.engine.block_hashes import BlockHashes
from gateway.engine.block_manager import NO_BLOCK, BlockAppend, BlockManager, FoundPrefix

NUM_BLOCKS, SIZE, MAX_STEP_TOKENS = 12, 4, 8
WINDOWS: list[tuple[int | None, ...]] = [(None,), (6,), (None, 1), (None, 7), (9, 3), (None, 5, 13)]


def manager(num_blocks: int, *windows: int | None, block_size: int = 4) -> BlockManager:
    """A pool for steps of up to eight tokens; one group that sees all by default."""
    groups = KvGroups.of(block_size, windows or (None,))
    return BlockManager(num_blocks, groups, MAX_STEP_TOKENS)


def opened(blocks: BlockManager, name: str, num_tokens: int) -> tuple[BlockAppend, ...] | None:
    """Opens a request of which nothing is found, and that is computed in one step."""
    return blocks.open(name, blocks.find(()), num_tokens, num_tokens)


def test_a_table_grows_by_whole_blocks() -> None:
    """A table has just the blocks that its tokens need, and keeps its earlier ones."""
    blocks = manager(4, block_size=16)
    assert opened(blocks, "a", 1) == (BlockAppend(0, 0, (0,)),)
    assert blocks.grow("a", 16) == ()
    assert blocks.grow("a", 33) == (BlockAppend(0, 1, (1, 2)),)
    assert blocks.table("a") == (0, 1, 2)
    assert (blocks.num_used, blocks.num_free) == (3, 1)


def test_too_few_blocks_change_nothing() -> None:
    """A table that cannot grow as far as asked does not grow at all."""
    blocks = manager(3)
    opened(blocks, "a", 8)
    assert opened(blocks, "b", 8) is None
    assert blocks.table("b") == ()
    assert blocks.grow("a", 17) is None
    assert blocks.table("a") == (0, 1)
    assert blocks.num_free == 1


def test_freed_blocks_are_used_again() -> None:
    """Freeing gives all blocks back, once."""
    blocks = manager(2)
    opened(blocks, "a", 8)
    assert blocks.free("a") == 2
    assert blocks.free("a") == 0
    assert opened(blocks, "b", 8) == (BlockAppend(0, 0, (0, 1)),)


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "message"),
    [(0, 16, "a pool of 0 blocks"), (4, 0, "blocks of 0 tokens"), (-1, 16, "a pool of -1 blocks")],
)
def test_an_empty_pool_is_refused(num_blocks: int, block_size: int, message: str) -> None:
    """A pool without room is a mistake, named with its value."""
    with pytest.raises(ValueError, match=message):
        manager(num_blocks, block_size=block_size)


def test_groups_share_the_pool() -> None:
    """Each has a table of its own; what is needed is needed in all of them."""
    blocks = manager(7, None, 5)
    assert opened(blocks, "a", 8) == (BlockAppend(0, 0, (0, 1)), BlockAppend(1, 0, (2, 3)))
    assert blocks.grow("a", 9) == (BlockAppend(0, 2, (4,)), BlockAppend(1, 2, (5,)))
    assert blocks.grow("a", 13) is None, "one block is left for two groups"


def test_a_window_frees_what_the_next_token_does_not_see() -> None:
    """With a window of 5 the token at 8 sees 4 ... 8, so the first block of four goes just then."""
    blocks = manager(7, None, 5)
    opened(blocks, "a", 8)
    blocks.free_unseen("a", 7)
    assert blocks.table("a", 1) == (2, 3), "token 7 sees token 3"
    blocks.free_unseen("a", 8)
    assert blocks.table("a", 1) == (NO_BLOCK, 3)
    assert blocks.table("a", 0) == (0, 1)
    assert blocks.num_used == 3
    blocks.check_integrity()


def test_a_long_sequence_takes_a_bounded_number_of_blocks() -> None:
    """With windows only, 10 000 tokens are generated in a pool for a few dozen."""
    blocks = manager(7, 9, 3)
    opened(blocks, "a", 1)
    for num_tokens in range(1, 10_000):
        blocks.free_unseen("a", num_tokens)
        assert blocks.grow("a", num_tokens + 1) is not None
        assert blocks.num_used <= 3 + 2
    assert blocks.free("a") <= 5


def test_a_prompt_gets_blocks_for_its_first_step_where_there_is_a_window() -> None:
    """Though it is admitted only if all fits: 40 tokens are ten blocks where all is seen, and with
    a window of 5 and steps of 8 twelve tokens at a time, which lie in four blocks at most."""
    for num_blocks, fits in ((13, False), (14, True)):
        blocks = manager(num_blocks, None, 5)
        found = blocks.find(())
        appended = blocks.open("a", found, 40, 8)
        assert (appended is not None) == fits
    assert [len(append.block_ids) for append in appended or ()] == [10, 2]
    assert blocks.num_lacking("a", 40) == 2


def test_a_hit_needs_only_what_the_next_token_sees() -> None:
    """A prefix whose head was lost in the group with a window is found all the same."""
    blocks = manager(20, None, 6)
    names = _names(range(40))
    opened(blocks, "a", 16)
    for index in range(4):
        blocks.keep("a", index, names[index])
    blocks.free_unseen("a", 16)
    assert blocks.table("a", 1) == (NO_BLOCK, NO_BLOCK, 6, 7)
    assert blocks.find(names[:4]) == FoundPrefix(4, ((0, 1, 2, 3), (NO_BLOCK, NO_BLOCK, 6, 7)))
    assert blocks.find(names[:2]).num_blocks == 2, "freed, but not taken yet"


@given(
    windows=st.lists(st.sampled_from([None, 1, 3, 4, 5, 8, 11]), min_size=1, max_size=3),
    present=st.lists(st.sets(st.integers(0, 9)), min_size=3, max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_the_longest_usable_prefix_is_found(
    windows: list[int | None], present: list[set[int]]
) -> None:
    """For any blocks that happen to be there: as long as the token after it sees none missing."""
    blocks = manager(10 * len(windows), *windows)
    names = _names(range(40))
    opened(blocks, "a", 40)
    for index, name in enumerate(names):
        blocks.keep("a", index, name)
    blocks.free("a")
    for group, known in enumerate(blocks._block_of):
        for index in {*range(10)} - present[group]:
            del blocks._name_of[known.pop(names[index])]

    def usable(length: int) -> bool:
        return all(
            position // SIZE in present[group]
            for group, window in enumerate(windows)
            for position in _seen(length * SIZE, window)
        )

    found = blocks.find(names)
    assert found.num_blocks == max(length for length in range(11) if usable(length))


def _seen(position: int, window: int | None) -> range:
    """Earlier positions that the token at one sees."""
    return range(0 if window is None else max(0, position - window + 1), position)


@dataclass
class _Holder:
    """A request of the model: its tokens, and the blocks that it got."""

    tokens: tuple[int, ...]
    tables: list[list[int]]
    num_committed: int
    num_named: int

    def held(self, group: int) -> list[int]:
        return [block for block in self.tables[group] if block != NO_BLOCK]


class BlockMachine(RuleBasedStateMachine):
    """Any sequence of opening, growing, naming and freeing, against a model.

    The model writes tokens into blocks and knows when each was freed, and so which free block may
    be taken, and what a block that is found must hold.
    """

    @initialize(windows=st.sampled_from(WINDOWS))
    def start(self, windows: tuple[int | None, ...]) -> None:
        self.windows = windows
        self.num_blocks = NUM_BLOCKS * len(windows)
        self.blocks = manager(self.num_blocks, *windows)
        self.holders: dict[str, _Holder] = {}
        self.content: dict[int, tuple[int, tuple[int, ...]]] = {}
        """Block to its group and the whole prefix up to its end, of those that may be found."""
        self.freed: dict[int, int] = dict.fromkeys(range(self.num_blocks), 0)
        """Free block to its place in the order of freeing."""
        self.time = 0

    @rule(
        name=st.sampled_from("abcdef"),
        stem=st.integers(0, 2),
        num_tokens=st.integers(1, 40),
        chunk=st.integers(1, MAX_STEP_TOKENS),
        headroom=st.integers(0, 2),
    )
    def open(self, name: str, stem: int, num_tokens: int, chunk: int, headroom: int) -> None:
        if name in self.holders:
            return
        tokens = tuple((stem * (position > 3) + position) % 7 for position in range(num_tokens))
        found = self.blocks.find(_names(tokens)[: (num_tokens - 1) // SIZE])
        self._check_found(found, tokens)
        num_found = found.num_blocks * SIZE
        end = min(num_tokens, num_found + chunk)
        lengths = [_num_blocks(end if window else num_tokens) for window in self.windows]
        needed = sum(length - found.num_blocks for length in lengths)
        needed += sum(block in self.freed for table in found.tables for block in table)
        for window, length, table in zip(self.windows, lengths, found.tables, strict=True):
            held = length - table.count(NO_BLOCK)
            needed += max(0, _most_blocks(num_tokens, window) - held)
        appended = self.blocks.open(name, found, num_tokens, end, headroom=headroom)
        assert (appended is None) == (needed + headroom > len(self.freed))
        if appended is None:
            return
        tables = [list(table) for table in found.tables]
        for block in {block for table in tables for block in table} - {NO_BLOCK}:
            self.freed.pop(block, None)
        for (group, start, block_ids), table in zip(appended, tables, strict=True):
            assert (start, block_ids[: len(table) - start]) == (
                table.count(NO_BLOCK),
                tuple(table[start:]),
            )
            new = block_ids[len(table) - start :]
            self._take(new)
            tables[group] = [*table, *new]
        assert [len(table) for table in tables] == lengths
        self.holders[name] = _Holder(tokens, tables, num_found, found.num_blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), num_tokens=st.integers(1, 40))
    def grow(self, data: st.DataObject, num_tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.holders)))
        holder = self.holders[name]
        missing = [max(0, _num_blocks(num_tokens) - len(table)) for table in holder.tables]
        appended = self.blocks.grow(name, num_tokens)
        assert (appended is None) == (sum(missing) > len(self.freed))
        for group, start, block_ids in appended or ():
            assert (start, len(block_ids)) == (len(holder.tables[group]), missing[group])
            self._take(block_ids)
            holder.tables[group] += block_ids
        if appended is not None:
            holder.tokens += (9,) * max(0, num_tokens - len(holder.tokens))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), num_tokens=st.integers(1, 16), named=st.booleans())
    def commit(self, data: st.DataObject, num_tokens: int, named: bool) -> None:
        """More tokens are computed: full blocks get names, unseen ones are freed."""
        name = data.draw(st.sampled_from(sorted(self.holders)))
        holder = self.holders[name]
        num_covered = min(len(table) for table in holder.tables) * SIZE
        most = min(num_covered, len(holder.tokens), holder.num_committed + num_tokens)
        holder.num_committed = most
        if named and holder.num_named * SIZE >= most - num_tokens:
            self._name(name, most // SIZE)
        self.blocks.free_unseen(name, most)
        for group, window in enumerate(self.windows):
            table, first = holder.tables[group], min([*_seen(most, window), most]) // SIZE
            unseen = [block for block in table[:first] if block != NO_BLOCK]
            table[:first] = [NO_BLOCK] * first
            self._let_go(unseen)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), doubted=st.booleans())
    def free(self, data: st.DataObject, doubted: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.holders)))
        holder = self.holders[name]
        if doubted:
            names = _names(holder.tokens)[: holder.num_named]
            self.blocks.forget(names)
            doubtful = [holder.tokens[: (i + 1) * SIZE] for i in range(holder.num_named)]
            for block, (_, prefix) in list(self.content.items()):
                if prefix in doubtful:
                    del self.content[block]
        del self.holders[name]
        groups = sorted(range(len(self.windows)), key=lambda group: self.windows[group] is None)
        held = [block for group in groups for block in reversed(holder.held(group))]
        assert self.blocks.free(name) == len(held)
        self._let_go(held)

    def _name(self, name: str, num_full: int) -> None:
        holder = self.holders[name]
        for index in range(holder.num_named, num_full):
            prefix = holder.tokens[: (index + 1) * SIZE]
            if any(table[index] == NO_BLOCK for table in holder.tables):
                return  # it was left out when it could have been named
            self.blocks.keep(name, index, _names(prefix)[-1])
            for group, table in enumerate(holder.tables):
                block, content = table[index], (group, prefix)
                if content not in self.content.values() and block not in self.content:
                    self.content[block] = content
            holder.num_named = index + 1

    def _check_found(self, found: FoundPrefix, tokens: tuple[int, ...]) -> None:
        for group, window in enumerate(self.windows):
            table = found.tables[group]
            assert len(table) == found.num_blocks
            seen = {position // SIZE for position in _seen(found.num_blocks * SIZE, window)}
            for index, block in enumerate(table):
                assert (block != NO_BLOCK) == (index in seen)
                if index in seen:
                    assert self.content[block] == (group, tokens[: (index + 1) * SIZE])

    def _let_go(self, blocks: Iterable[int]) -> None:
        others = {
            block for holder in self.holders.values() for table in holder.tables for block in table
        }
        for block in blocks:
            if block not in others:
                self.time += 1
                self.freed[block] = self.time

    def _take(self, taken: Sequence[int]) -> None:
        """Each block taken is free and the one that is missed least."""
        for block in taken:
            unnamed = [free for free in self.freed if free not in self.content]
            oldest = min(self.freed, key=lambda free: self.freed[free])
            assert block in unnamed if unnamed else block == oldest
            del self.freed[block]
            self.content.pop(block, None)

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "blocks"):
            return
        self.blocks.check_integrity()
        held: set[int] = set()
        for name, holder in self.holders.items():
            for group, table in enumerate(holder.tables):
                assert list(self.blocks.table(name, group)) == table
                held.update(holder.held(group))
            assert self.blocks.held_by(name) <= held
        assert held.isdisjoint(self.freed)
        assert (self.blocks.num_used, self.blocks.num_free) == (len(held), len(self.freed))
        assert self.blocks.num_kept == len(self.content)


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // SIZE)


def _most_blocks(num_tokens: int, window: int | None) -> int:
    """Blocks that any stretch of tokens which are seen or computed by one step can touch."""
    span = num_tokens if window is None else min(num_tokens, window - 1 + MAX_STEP_TOKENS)
    return max(
        len({position // SIZE for position in range(start, start + span)})
        for start in range(num_tokens - span + 1)
    )


def _names(tokens: Sequence[int]) -> list[bytes]:
    return BlockHashes(SIZE).first(tokens, len(tokens) // SIZE)


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
