"""Which attention worker takes a request: the one that will be done with its prompt first.

The cost of a place, in tokens to compute, is what is pending there, a share for each request that
runs there, and the part of the prompt that its prefix cache lacks:

    cost(e) = pending prompt tokens(e) + 16 * requests(e) + prompt tokens - known prefix(e)

So requests with a common prefix meet where it is cached, until that place is busier than computing
the prefix once more would take.

Thread safety: the owner holds a lock, but for `names`, which takes long for a long prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gateway.engine.block_hashes import BlockHashes

_TOKENS_PER_REQUEST = 16
"""What one running request costs others, as prompt tokens: it slows every step a little."""
_MAX_PREFIXES = 65_536
"""Blocks of prefixes that are remembered; those used longest ago are forgotten first."""


@dataclass(frozen=True)
class Place:
    """Where a request goes, and what it costs there."""

    engine: int
    num_tokens: int
    """Prompt tokens to compute."""


class RequestPlacement:
    """Load and prefixes of several engines.

    Args:
        num_engines: How many; they are numbered from 0.
        block_size: Tokens of a KV block.

    Attributes:
        names: Names of a prompt's blocks, from its tokens and salt; changes nothing.
    """

    def __init__(self, num_engines: int, block_size: int) -> None:
        self._block_size = block_size
        self._pending_tokens = [0] * num_engines
        self._num_requests = [0] * num_engines
        self._engines_of: OrderedDict[bytes, set[int]] = OrderedDict()
        # A single engine is the best one in any case: nothing is hashed or remembered.
        self.names = self._block_names if num_engines > 1 else _no_names

    def rank(self, names: Sequence[bytes], num_tokens: int, usable: Collection[int]) -> list[Place]:
        """The usable engines, best first.

        Args:
            names: Of the prompt's blocks.
            num_tokens: Of the prompt.
            usable: Engines in question.
        """
        places = [Place(engine, num_tokens - self._num_known(names, engine)) for engine in usable]
        return sorted(places, key=self._cost)

    def enter(self, place: Place, names: Sequence[bytes]) -> None:
        """A request went to a place: its prefix will be known there."""
        self._pending_tokens[place.engine] += place.num_tokens
        self._num_requests[place.engine] += 1
        for name in names:
            self._engines_of.setdefault(name, set()).add(place.engine)
            self._engines_of.move_to_end(name)
        while len(self._engines_of) > _MAX_PREFIXES:
            self._engines_of.popitem(last=False)

    def computed(self, place: Place) -> None:
        """The prompt of a request was computed, or will not be any more."""
        self._pending_tokens[place.engine] -= place.num_tokens

    def leave(self, place: Place) -> None:
        """A request ended."""
        self._num_requests[place.engine] -= 1

    def forget(self, engine: int) -> None:
        """An engine lost its prefix cache."""
        for engines in self._engines_of.values():
            engines.discard(engine)

    def _block_names(self, prompt_token_ids: Sequence[int], salt: str) -> list[bytes]:
        num_full = (len(prompt_token_ids) - 1) // self._block_size
        return BlockHashes(self._block_size, salt).first(prompt_token_ids, num_full)

    def _num_known(self, names: Sequence[bytes], engine: int) -> int:
        """Tokens of the leading blocks that an engine has seen."""
        for index, name in enumerate(names):
            if engine not in self._engines_of.get(name, ()):
                return index * self._block_size
        return len(names) * self._block_size

    def _cost(self, place: Place) -> tuple[int, int]:
        load = self._pending_tokens[place.engine]
        load += _TOKENS_PER_REQUEST * self._num_requests[place.engine]
        return load + place.num_tokens, place.engine


def _no_names(prompt_token_ids: Sequence[int], salt: str) -> list[bytes]:
    return []
