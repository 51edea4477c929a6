"""How many KV blocks sequences take, in layers that see everything and in layers with a window.

Layers that remember alike and see equally far form a KV group. A KV block holds `block_size`
consecutive tokens of one sequence in the layers of one group, so a sequence has blocks in each:

    tokens             0 ..... 15 | 16 .... 31 | 32 .... 47 | 48 .. 52      next: 53
    sees all           block        block        block        block
    window of 20       -            -            block        block         sees 34 ... 53

In a group with a window, blocks that the next token does not see are needed no more: a long
sequence takes no more of them than one of a window and a step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

UNLIMITED = 2**62
"""The window of layers that see everything."""


@dataclass(frozen=True)
class KvGroups:
    """The KV groups of a model, and how a sequence is kept in them."""

    block_size: int
    """Tokens of a block, in every group."""
    windows: tuple[int, ...]
    """Per group: how many tokens a token sees, itself included."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"blocks of {self.block_size} tokens: expected at least 1")
        if min(self.windows, default=0) < 1:
            raise ValueError(f"windows are {self.windows}, expected one or more of at least 1")

    @classmethod
    def of(cls, block_size: int, sliding_windows: Sequence[int | None]) -> KvGroups:
        """Groups with these windows; None where everything is seen."""
        windows = (UNLIMITED if window is None else window for window in sliding_windows)
        return cls(block_size, tuple(windows))

    @property
    def num_groups(self) -> int:
        """How many groups there are."""
        return len(self.windows)

    @cached_property
    def whole(self) -> tuple[int, ...]:
        """Groups that keep a sequence whole."""
        return tuple(g for g, window in enumerate(self.windows) if window == UNLIMITED)

    @cached_property
    def windowed(self) -> tuple[int, ...]:
        """Groups with a window."""
        return tuple(g for g, window in enumerate(self.windows) if window != UNLIMITED)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of one group that hold this many tokens from the first one on."""
        return -(-num_tokens // self.block_size)

    def first_seen(self, group: int, position: int) -> int:
        """Index of the first block that the token at `position` sees; later ones see no less."""
        return max(0, position - self.windows[group] + 1) // self.block_size

    def last_to_see(self, group: int, index: int) -> int:
        """Position of the last token that sees something of the block at this index."""
        return (index + 1) * self.block_size + self.windows[group] - 2

    def most_blocks(self, group: int, num_tokens: int, max_step_tokens: int) -> int:
        """Blocks of a group that a sequence takes at a time, at most.

        A step computes tokens of which the first one sees `window - 1` tokens before it.

        Args:
            group: Index of the group.
            num_tokens: Of the sequence.
            max_step_tokens: Most tokens of it that one step computes.
        """
        span = min(num_tokens, self.windows[group] - 1 + max_step_tokens)
        unaligned = (span + self.block_size - 2) // self.block_size + 1
        return min(self.blocks_for(num_tokens), unaligned)

    def sequence_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """Blocks of all groups that a sequence takes at a time, at most; see `most_blocks`."""
        groups = range(self.num_groups)
        return sum(self.most_blocks(group, num_tokens, max_step_tokens) for group in groups)

    def longest_sequence(self, num_blocks: int, model_len: int, max_step_tokens: int) -> int:
        """Tokens of the longest sequence that fits into a pool alone, `model_len` at most."""
        lengths = range(0, model_len + self.block_size, self.block_size)
        index = bisect_right(
            lengths, num_blocks, key=lambda num: self.sequence_blocks(num, max_step_tokens)
        )
        return min(model_len, lengths[index - 1])

    def capacity(self, num_blocks: int) -> int:
        """Tokens that a pool holds in all groups, however they are shared among sequences."""
        return num_blocks // self.num_groups * self.block_size
