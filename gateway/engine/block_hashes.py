"""Names of KV blocks by their content: a chain of hashes over a sequence.

    name[0] = H(H(salt), tokens 0..15)    name[i] = H(name[i-1], tokens of block i)

Equal names mean equal tokens from the first one on, so equal keys and values. The salt keeps
tenants apart: without it one could find out by timing what another one asked.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_DIGEST_BYTES = 20
"""About 2**80 blocks until two with different contents are likely to share a name."""


class BlockHashes:
    """Names of the blocks of one sequence, grown with it.

    Args:
        block_size: Tokens of a block.
        salt: Prefixes are shared only under the same salt.
    """

    def __init__(self, block_size: int, salt: str = "") -> None:
        self._block_size = block_size
        self._root = blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest()
        self._names: list[bytes] = []

    def first(self, token_ids: Sequence[int], num_blocks: int) -> list[bytes]:
        """Names of the first `num_blocks` blocks, which must be full. The sequence only grows."""
        size = self._block_size
        while len(self._names) < num_blocks:
            index = len(self._names)
            tokens = array("i", token_ids[index * size : (index + 1) * size]).tobytes()
            parent = self._names[-1] if self._names else self._root
            self._names.append(blake2b(tokens, key=parent, digest_size=_DIGEST_BYTES).digest())
        return self._names[:num_blocks]
