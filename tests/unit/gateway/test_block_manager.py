"""KV block accounting: nothing leaks, nothing is used twice, whatever is asked."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.block_manager import BlockManager


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


class BlockMachine(RuleBasedStateMachine):
    """Any sequence of growing and freeing, against a model that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(num_blocks=12, block_size=4)
        self.expected: dict[str, list[int]] = {}

    @rule(name=st.sampled_from("abcdef"), num_tokens=st.integers(1, 40))
    def grow(self, name: str, num_tokens: int) -> None:
        held = self.expected.get(name, [])
        needed = max(0, -(-num_tokens // 4) - len(held))
        free = 12 - sum(len(table) for table in self.expected.values())
        added = self.blocks.grow(name, num_tokens)
        if needed > free:
            assert added is None
        else:
            assert added is not None
            assert len(added) == needed
            if added:
                self.expected[name] = [*held, *added]

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.expected)))
        assert self.blocks.free(name) == len(self.expected.pop(name))

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.blocks.check_integrity()
        for name, table in self.expected.items():
            assert list(self.blocks.table(name)) == table
        assert self.blocks.num_used == sum(len(table) for table in self.expected.values())


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
