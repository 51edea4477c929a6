"""Drafts by n-gram lookup: against the reference, and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from expertmesh_kernels.drafts import propose, propose_reference


def _propose(tokens: list[int], wanted: int, longest: int = 4, shortest: int = 2) -> list[int]:
    table = np.full((3, 64), -1, np.int32)
    table[1, : len(tokens)] = tokens
    length = np.array([len(tokens)])
    [found] = propose(table, np.array([1]), length, np.array([wanted]), longest, shortest)
    assert (table[[0, 2]] == -1).all()
    assert (table[1, len(tokens) + found :] == -1).all()
    assert table[1, : len(tokens)].tolist() == tokens
    return table[1, len(tokens) : len(tokens) + found].tolist()


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9]),
        ([1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2]),  # the latest of equally long ones
        ([5, 1, 2, 7, 1, 2, 8, 5, 1, 2], [7, 1, 2]),  # a longer run counts for more
        ([6, 6, 6], [6, 6, 6]),  # beyond the end: the drafts themselves
        ([1, 2, 1, 2], [1, 2, 1]),
        ([1, 3, 4, 1], []),  # one token is too short
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_drafts_are_what_followed(tokens: list[int], drafts: list[int]) -> None:
    """By hand."""
    assert _propose(tokens, 3) == drafts


def test_drafts_match_the_reference() -> None:
    """Random tokens of few ids, all lengths of runs."""
    rng = np.random.default_rng(1)
    found = 0
    for _ in range(500):
        tokens = rng.integers(0, 4, rng.integers(1, 40)).tolist()
        shortest = int(rng.integers(1, 4))
        longest, wanted = int(rng.integers(shortest, 8)), int(rng.integers(0, 9))
        expected = propose_reference(tokens, wanted, longest, shortest)
        assert _propose(tokens, wanted, longest, shortest) == expected
        found += bool(expected)
    assert 100 < found < 500


def test_rows_are_independent() -> None:
    """Several rows at once get what each gets alone; a row that wants none gets none."""
    rows = [[1, 2, 3, 1, 2], [4, 5, 6], [7, 7, 7, 7], [8, 9, 8, 9]]
    table = np.zeros((4, 16), np.int32)
    for row, tokens in enumerate(rows):
        table[row, : len(tokens)] = tokens
    lengths = np.array([len(tokens) for tokens in rows])
    found = propose(table, np.arange(4), lengths, np.array([2, 2, 0, 1]), 4, 2)
    assert found.tolist() == [2, 0, 0, 1]
    assert table[0, 5:7].tolist() == [3, 1]
    assert table[3, 4] == 8
