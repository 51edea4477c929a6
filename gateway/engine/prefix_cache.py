"""Reuse of KV blocks between requests whose tokens begin alike (see `block_hashes.py`).

Owner: the scheduler, in the engine thread.
"""

from __future__ import annotations

from typing import Protocol

from gateway.engine.block_hashes import BlockHashes
from gateway.engine.block_manager import BlockManager, FoundPrefix
from gateway.engine.request_state import RequestState


class PrefixCache(Protocol):
    """Finds and keeps the blocks of requests."""

    def find(self, state: RequestState, blocks: BlockManager) -> FoundPrefix:
        """Blocks that hold the keys and values of a request's first tokens."""

    def keep(self, state: RequestState, num_committed: int, blocks: BlockManager) -> None:
        """Names the full blocks among a running request's first `num_committed` tokens."""

    def forget(self, state: RequestState, blocks: BlockManager) -> None:
        """Lets nobody find what a running request computed or found."""


_NO_MORE = 2**31  # blocks of a sequence; none is so long


class NoPrefixCache:
    """Finds nothing."""

    def find(self, state: RequestState, blocks: BlockManager) -> FoundPrefix:
        """Nothing."""
        return blocks.find(())

    def keep(self, state: RequestState, num_committed: int, blocks: BlockManager) -> None:
        """Does nothing."""

    def forget(self, state: RequestState, blocks: BlockManager) -> None:
        """Does nothing."""


class HashedPrefixCache:
    """Finds blocks by the names of their contents."""

    def find(self, state: RequestState, blocks: BlockManager) -> FoundPrefix:
        """Blocks for the longest known prefix that leaves at least the last token to compute.

        Requests that want to know something of each prompt token compute all of them.
        """
        params = state.request.params
        if params.num_prompt_logprobs is not None or params.return_routed_experts:
            return blocks.find(())
        num_full = (len(state.token_ids) - 1) // blocks.block_size
        return blocks.find(_hashes(state, blocks).first(state.token_ids, num_full))

    def keep(self, state: RequestState, num_committed: int, blocks: BlockManager) -> None:
        """Names blocks that became full; see PrefixCache."""
        num_full = num_committed // blocks.block_size
        if num_full <= state.num_kept_blocks:
            return
        names = _hashes(state, blocks).first(state.token_ids, num_full)
        for index in range(state.num_kept_blocks, num_full):
            blocks.keep(state.request_id, index, names[index])
        state.num_kept_blocks = num_full

    def forget(self, state: RequestState, blocks: BlockManager) -> None:
        """Forgets the names of its full blocks, also of those that are behind windows by now; gives
        no more names as long as it keeps its slot."""
        if state.num_kept_blocks < _NO_MORE:
            blocks.forget(_hashes(state, blocks).first(state.token_ids, state.num_kept_blocks))
            state.num_kept_blocks = _NO_MORE


def _hashes(state: RequestState, blocks: BlockManager) -> BlockHashes:
    if state.hashes is None:
        state.hashes = BlockHashes(blocks.block_size, state.request.cache_salt)
    return state.hashes
