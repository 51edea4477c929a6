"""Drafts by n-gram lookup: what followed the latest tokens when they came before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.drafts import propose as cpu_propose
from expertmesh_kernels.host import as_input


def propose(
    token_ids_SL: NDArray[np.int32],
    slots_N: NDArray[np.int64],
    lengths_N: NDArray[np.int64],
    wanted_N: NDArray[np.int64],
    longest: int,
    shortest: int,
) -> NDArray[np.int64]:
    """Writes drafts behind the tokens of rows, and returns how many, [N].

    Looked for is the longest run of latest tokens, `shortest` to `longest` of them, that occurs
    further back; of equally long ones the latest. The drafts are what followed there; where that
    reaches the end of the tokens it goes on with the drafts themselves, so a loop goes on looping.

    Args:
        token_ids_SL: Tokens by row; written at [length, length + wanted).
        slots_N: Rows, different from each other.
        lengths_N: Tokens of each.
        wanted_N: Drafts of each, for which there is room; none are written if nothing is found.
        longest: At least `shortest`.
        shortest: At least 1.
    """
    num_found_N = np.zeros(len(slots_N), np.int64)
    cpu_propose(
        token_ids_SL, as_input(slots_N, np.int64), as_input(lengths_N, np.int64),
        as_input(wanted_N, np.int64), longest, shortest, num_found_N,
    )  # fmt: skip
    return num_found_N


def propose_reference(tokens: Sequence[int], wanted: int, longest: int, shortest: int) -> list[int]:
    """The drafts of one row."""
    tokens = list(tokens)
    for run_len in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        run = tokens[-run_len:]
        starts = range(len(tokens) - run_len - 1, -1, -1)
        found = next((at for at in starts if tokens[at : at + run_len] == run), None)
        if found is not None:
            for at in range(found + run_len, found + run_len + wanted):
                tokens.append(tokens[at])
            return tokens[len(tokens) - wanted :] if wanted else []
    return []
