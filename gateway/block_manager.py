"""Which KV blocks belong to which request: exact accounting, no memory of contents.

Owner: the scheduler, in the engine thread. A block is free or in exactly one block table.

    request's tokens   0 ........ 15 | 16 ....... 31 | 32 ..
    its block table    block 7       | block 2       | block 9        (block_size 16)
"""

from __future__ import annotations


class BlockManager:
    """A pool of equal KV blocks.

    Args:
        num_blocks: Blocks in the pool, with ids from 0.
        block_size: Tokens of one block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"{num_blocks} blocks of {block_size} tokens: expected at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # taken from the end: lowest id first
        self._tables: dict[str, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that belong to nobody."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks in block tables."""
        return self.num_blocks - len(self._free)

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def grow(self, request_id: str, num_tokens: int) -> tuple[int, ...] | None:
        """Extends a block table so that it holds `num_tokens` in all.

        Returns:
            The ids appended, in order (empty if it was large enough); None if too few are free, in
            which case nothing changed.
        """
        held = len(self._tables.get(request_id, ()))
        missing = self.blocks_for(num_tokens) - held
        if missing > len(self._free):
            return None
        if missing <= 0:
            return ()
        added = [self._free.pop() for _ in range(missing)]
        self._tables.setdefault(request_id, []).extend(added)
        return tuple(added)

    def free(self, request_id: str) -> int:
        """Gives back all blocks of a request; returns how many there were."""
        table = self._tables.pop(request_id, [])
        self._free.extend(reversed(table))
        return len(table)

    def table(self, request_id: str) -> tuple[int, ...]:
        """Block table of a request; empty for one without blocks."""
        return tuple(self._tables.get(request_id, ()))

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is free or in one table, exactly once."""
        held = [block for table in self._tables.values() for block in table]
        everything = sorted(self._free + held)
        assert everything == list(range(self.num_blocks)), (
            f"{len(self._free)} free and {len(held)} held blocks are not the {self.num_blocks} of "
            "the pool, each once"
        )
        assert all(self._tables.values()), "a request has an empty block table"
