"""KV block accounting: nothing leaks, nothing is used twice, whatever is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.engine.block_hashes import BlockHashes
from gateway.engine.block_manager import BlockManager

NUM_BLOCKS, SIZE = 12, 4


def test_a_table_grows_by_whole_blocks() -> None:
    """A table has just the blocks that its tokens need, and keeps its earlier ones."""
    blocks = BlockManager(num_blocks=4, block_size=16)
    assert blocks.grow("a", 1) == (0,)
    assert blocks.grow("a", 16) == ()
    assert blocks.grow("a", 33) == (1, 2)
    assert blocks.table("a") == (0, 1, 2)
    assert (blocks.num_used, blocks.num_free) == (3, 1)


def test_too_few_blocks_change_nothing() -> None:
    """A table that cannot grow as far as asked does not grow at all."""
    blocks = BlockManager(num_blocks=3, block_size=4)
    assert blocks.grow("a", 8) == (0, 1)
    assert blocks.grow("b", 8) is None
    assert blocks.table("b") == ()
    assert blocks.num_free == 1


def test_freed_blocks_are_used_again() -> None:
    """Freeing gives all blocks back, once."""
    blocks = BlockManager(num_blocks=2, block_size=4)
    blocks.grow("a", 8)
    assert blocks.free("a") == 2
    assert blocks.free("a") == 0
    assert blocks.grow("b", 8) == (0, 1)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0), (-1, 16)])
def test_an_empty_pool_is_refused(num_blocks: int, block_size: int) -> None:
    """A pool without room is a mistake, named with its values."""
    with pytest.raises(ValueError, match=f"{num_blocks} blocks of {block_size} tokens"):
        BlockManager(num_blocks, block_size)


@dataclass
class _Holder:
    """A request of the model: its tokens, and the blocks that it got."""

    tokens: tuple[int, ...]
    blocks: list[int]
    num_named: int = 0


class BlockMachine(RuleBasedStateMachine):
    """Any sequence of opening, growing, naming and freeing, against a model.

    The model writes tokens into blocks and knows when each was freed, and so which free block may
    be taken, and what a block that is found must hold.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS, SIZE)
        self.holders: dict[str, _Holder] = {}
        self.content: dict[int, tuple[int, ...]] = {}
        """Block to the whole prefix up to its end, of the blocks that may be found."""
        self.freed: dict[int, tuple[int, int]] = dict.fromkeys(range(NUM_BLOCKS), (0, 0))
        """Free block to when it was freed; of one request the tail comes first."""
        self.time = 0

    @rule(
        name=st.sampled_from("abcdef"),
        stem=st.integers(0, 2),
        num_tokens=st.integers(1, 40),
        headroom=st.integers(0, 2),
    )
    def open(self, name: str, stem: int, num_tokens: int, headroom: int) -> None:
        if name in self.holders:
            return
        tokens = tuple((stem * (position > 3) + position) % 7 for position in range(num_tokens))
        found = self.blocks.find(_names(tokens)[: (num_tokens - 1) // SIZE])
        for index, block in enumerate(found):
            assert self.content[block] == tokens[: (index + 1) * SIZE]
        needed = -(-num_tokens // SIZE) - sum(block not in self.freed for block in found)
        table = self.blocks.open(name, found, num_tokens, headroom=headroom)
        assert (table is None) == (needed + headroom > len(self.freed))
        if table is not None:
            assert list(table[: len(found)]) == found
            for block in found:
                self.freed.pop(block, None)
            self._take(table[len(found) :])
            self.holders[name] = _Holder(tokens, list(table), len(found))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), num_tokens=st.integers(1, 40))
    def grow(self, data: st.DataObject, num_tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.holders)))
        holder = self.holders[name]
        needed = max(0, -(-num_tokens // SIZE) - len(holder.blocks))
        added = self.blocks.grow(name, num_tokens)
        assert (added is None) == (needed > len(self.freed))
        if added is not None:
            assert len(added) == needed
            self._take(added)
            holder.blocks += added
            num_more = max(0, len(holder.blocks) * SIZE - len(holder.tokens))
            holder.tokens += (9,) * num_more

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), num_blocks=st.integers(1, 4))
    def keep(self, data: st.DataObject, num_blocks: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.holders)))
        holder = self.holders[name]
        num_full = min(holder.num_named + num_blocks, len(holder.tokens) // SIZE)
        for index in range(holder.num_named, num_full):
            prefix = holder.tokens[: (index + 1) * SIZE]
            known = prefix in self.content.values()
            self.blocks.keep(name, index, _names(prefix)[-1])
            if not known:
                self.content[holder.blocks[index]] = prefix
        holder.num_named = num_full

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), doubted=st.booleans())
    def free(self, data: st.DataObject, doubted: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.holders)))
        held = self.holders.pop(name).blocks
        if doubted:
            self.blocks.forget_contents(name)
            for block in held:
                self.content.pop(block, None)
        assert self.blocks.free(name) == len(held)
        self.time += 1
        others = {block for holder in self.holders.values() for block in holder.blocks}
        for index, block in enumerate(held):
            if block not in others:
                self.freed[block] = (self.time, -index)

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
        self.blocks.check_integrity()
        for name, holder in self.holders.items():
            assert list(self.blocks.table(name)) == holder.blocks
        held = {block for holder in self.holders.values() for block in holder.blocks}
        assert held.isdisjoint(self.freed)
        assert (self.blocks.num_used, self.blocks.num_free) == (len(held), len(self.freed))
        assert self.blocks.num_kept == len(self.content)
        for prefix in set(self.content.values()):
            found = self.blocks.find([_names(prefix)[-1]])
            assert [self.content[block] for block in found] == [prefix]


def _names(tokens: Sequence[int]) -> list[bytes]:
    return BlockHashes(SIZE).first(tokens, len(tokens) // SIZE)


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
