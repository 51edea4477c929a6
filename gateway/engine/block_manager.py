"""Which KV blocks belong to which request, and which hold what an earlier one computed.

Owner: the scheduler, in the engine thread. A block is in block tables (several, if its content is
shared) or free. A free block keeps its content until it is taken for another one: that is the
prefix cache, and it costs no memory that requests could use.

    request's tokens   0 ........ 15 | 16 ....... 31 | 32 ..
    its block table    block 7       | block 2       | block 9        (block_size 16)
    hash               known, shared | known         | not full: none

Free blocks are taken oldest first: those without content, then those that were freed longest ago,
of one request the tail before the head, since a prefix is of use without what follows it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence


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
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_users = [0] * num_blocks
        self._tables: dict[str, list[int]] = {}
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

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
        return len(self._hash_of)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks with the content of the first hashes, as many as there are without a gap."""
        found = []
        for name in hashes:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def open(
        self, request_id: str, found: Sequence[int], num_tokens: int, *, headroom: int = 0
    ) -> tuple[int, ...] | None:
        """Makes the block table of a request that has none.

        Args:
            request_id: The request.
            found: Blocks to begin with, from `find`.
            num_tokens: Tokens that the table must hold.
            headroom: Blocks that must stay free.

        Returns:
            The table; None if too few blocks are free, in which case nothing changed.
        """
        assert request_id not in self._tables, f"{request_id} has a block table"
        missing = self.blocks_for(num_tokens) - len(found)
        num_revived = sum(self._num_users[block] == 0 for block in found)
        if missing + num_revived + headroom > len(self._free):
            return None
        for block in found:
            self._num_users[block] += 1
            self._free.pop(block, None)
        table = [*found, *(self._take() for _ in range(missing))]
        self._tables[request_id] = table
        return tuple(table)

    def grow(self, request_id: str, num_tokens: int) -> tuple[int, ...] | None:
        """Extends a block table so that it holds `num_tokens` in all.

        Returns:
            The ids appended, in order (empty if it was large enough); None if too few are free, in
            which case nothing changed.
        """
        missing = self.blocks_for(num_tokens) - len(self._tables.get(request_id, ()))
        if missing > len(self._free):
            return None
        if missing <= 0:
            return ()
        added = [self._take() for _ in range(missing)]
        self._tables.setdefault(request_id, []).extend(added)
        return tuple(added)

    def keep(self, request_id: str, index: int, name: bytes) -> None:
        """Names the content of a full block of a table, so that it can be found.

        The first block with a content stays the one that is found.
        """
        block = self._tables[request_id][index]
        if name not in self._block_of and block not in self._hash_of:
            self._block_of[name] = block
            self._hash_of[block] = name

    def forget_contents(self, request_id: str) -> None:
        """Takes the names off all blocks of a request: nobody finds them any more."""
        for block in self._tables.get(request_id, ()):
            name = self._hash_of.pop(block, None)
            if name is not None:
                del self._block_of[name]

    def free(self, request_id: str) -> int:
        """Gives back all blocks of a request; returns how many there were."""
        table = self._tables.pop(request_id, [])
        for block in reversed(table):
            self._num_users[block] -= 1
            if self._num_users[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)
        return len(table)

    def table(self, request_id: str) -> tuple[int, ...]:
        """Block table of a request; empty for one without blocks."""
        return tuple(self._tables.get(request_id, ()))

    def check_integrity(self) -> None:
        """Raises AssertionError unless free blocks, tables and names agree with each other."""
        users = Counter(block for table in self._tables.values() for block in table)
        assert self._num_users == [users[block] for block in range(self.num_blocks)]
        assert sorted([*self._free, *users]) == list(range(self.num_blocks)), (
            f"{len(self._free)} free and {len(users)} held blocks are not the {self.num_blocks} of "
            "the pool, each once"
        )
        assert all(self._tables.values()), "a request has an empty block table"
        assert all(len(set(table)) == len(table) for table in self._tables.values())
        assert {name: block for block, name in self._hash_of.items()} == self._block_of

    def _take(self) -> int:
        """The free block whose content is needed least."""
        block, _ = self._free.popitem(last=False)
        name = self._hash_of.pop(block, None)
        if name is not None:
            del self._block_of[name]
        self._num_users[block] = 1
        return block
