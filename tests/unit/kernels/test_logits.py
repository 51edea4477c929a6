"""Changes to logits: against their references, only the rows asked for, whatever is beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from expertmesh_kernels.logits import (
    Histories,
    add_bias,
    ban_sequences,
    ban_sequences_reference,
    ban_tokens,
    keep_only,
    keep_only_reference,
    penalize,
    penalize_reference,
    softcap_,
    token_bits,
)

ROWS, VOCAB, SLOTS, LENGTH = 12, 70, 5, 40
RNG = np.random.default_rng(3)


def make_logits() -> NDArray[np.float32]:
    """Seeded logits."""
    return np.random.default_rng(1).normal(size=(ROWS, VOCAB)).astype(np.float32)


def make_histories(num: int) -> Histories:
    """Tokens of a few ids, so that they repeat; what lies beyond an end is out of range."""
    tokens = RNG.integers(0, 9, (SLOTS, LENGTH)).astype(np.int32)
    ends_N = RNG.integers(1, LENGTH // 2, num)
    tokens[:, LENGTH // 2 :] = 2**30
    return Histories(
        tokens,
        RNG.integers(0, SLOTS, num),
        np.array([RNG.integers(0, e + 1) for e in ends_N]),
        ends_N,
    )


def test_penalties_match_the_reference() -> None:
    """Repetition counts prompt and output, presence and frequency the output alone."""
    rows = np.array([0, 2, 3, 7, 11])
    histories = make_histories(5)
    arguments = (
        np.array([1, 1.3, 2, 0.5, 1], np.float32),
        np.array([0, 0.5, -1, 2, 0], np.float32),
        np.array([0.7, 0, 0.1, -0.3, 0], np.float32),
    )
    actual, expected = make_logits(), make_logits()
    penalize(actual, rows, histories, *arguments)
    penalize_reference(expected, rows, histories, *arguments)
    np.testing.assert_array_equal(actual, expected)
    untouched = np.setdiff1d(np.arange(ROWS), [0, 2, 3, 7])
    np.testing.assert_array_equal(actual[untouched], make_logits()[untouched])
    assert (actual[[0, 2, 3, 7]] != make_logits()[[0, 2, 3, 7]]).any(axis=1).all()


def test_a_penalised_row_is_independent_of_its_batch() -> None:
    """Alone or among others a row gets the same bits."""
    rows, histories = np.arange(ROWS), make_histories(ROWS)
    arguments = [np.full(ROWS, value, np.float32) for value in (1.3, 0.4, 0.2)]
    together = make_logits()
    penalize(together, rows, histories, *arguments)
    for n in rows:
        alone = make_logits()
        one = Histories(
            histories.token_ids_SL, histories.slots_N[n : n + 1],
            histories.num_prompt_N[n : n + 1], histories.ends_N[n : n + 1],
        )  # fmt: skip
        penalize(alone, rows[n : n + 1], one, *(values[n : n + 1] for values in arguments))
        np.testing.assert_array_equal(alone[n], together[n])


def test_banned_sequences_match_the_reference() -> None:
    """Hundreds of sequences of one to three of few tokens: many match, many do not."""
    sequences = [RNG.integers(0, 9, RNG.integers(1, 4)) for _ in range(400)]
    rows, histories = RNG.integers(0, ROWS, 400), make_histories(400)
    actual, expected = make_logits(), make_logits()
    ban_sequences(actual, rows, histories, sequences)
    ban_sequences_reference(expected, rows, histories, sequences)
    np.testing.assert_array_equal(actual, expected)
    assert 0 < np.isinf(actual).sum() < 400


def test_the_prompt_does_not_begin_a_banned_sequence() -> None:
    """[4, 5] is banned after a generated 4, not after a prompt that ends with 4."""
    table = np.array([[1, 4, 0]], np.int32)
    for num_prompt, banned in ((1, True), (2, False)):
        logits = np.zeros((1, 6), np.float32)
        one = np.zeros(1, np.int64)
        histories = Histories(table, one, np.array([num_prompt]), np.array([2]))
        ban_sequences(logits, one, histories, [np.array([4, 5])])
        assert np.isinf(logits).tolist() == [[False] * 5 + [banned]]


def test_kept_tokens_match_the_reference() -> None:
    """Also for the last word, which is not full."""
    rows = np.array([1, 4, 5, 6])
    bits = np.stack([token_bits(RNG.integers(0, VOCAB, 30), VOCAB) for _ in range(3)])
    bits = np.concatenate([bits, np.full((1, 3), 0xFFFFFFFF, np.uint32)])
    actual, expected = make_logits(), make_logits()
    keep_only(actual, rows, bits)
    keep_only_reference(expected, rows, bits)
    np.testing.assert_array_equal(actual, expected)
    assert np.isinf(actual[rows[:3]]).any(axis=1).all()
    np.testing.assert_array_equal(actual[6], make_logits()[6])


def test_token_bits_hold_the_tokens_named() -> None:
    """Bit i of word w is token 32 w + i."""
    assert token_bits(np.array([0, 31, 32, 69]), VOCAB).tolist() == [1 | 1 << 31, 1, 1 << 5]


def test_bias_and_bans_change_single_logits() -> None:
    """A bias given twice adds up; a banned token is out."""
    logits = np.zeros((2, 4), np.float32)
    add_bias(logits, np.array([1, 1, 0]), np.array([2, 2, 3]), np.array([1, 2, 5], np.float32))
    ban_tokens(logits, np.array([0, 1]), np.array([0, 3]))
    inf = float("inf")
    assert logits.tolist() == [[-inf, 0, 0, 5], [0, 0, 3, -inf]]


def test_softcap_is_that_of_torch_and_invariant() -> None:
    """In place, for any place in the tensor; other layouts are refused, not copied."""
    logits_RV = torch.randn(5, 1003, generator=torch.Generator().manual_seed(0)) * 60
    alone = [logits_RV[r : r + 1, v : v + 7].clone() for r in range(5) for v in (0, 3, 996)]
    expected = 30 * torch.tanh(logits_RV / 30)
    softcap_(logits_RV, 30.0)
    torch.testing.assert_close(logits_RV, expected, rtol=1e-6, atol=1e-6)
    for part in alone:
        softcap_(part, 30.0)
    parts = [logits_RV[r : r + 1, v : v + 7] for r in range(5) for v in (0, 3, 996)]
    assert torch.equal(torch.cat(alone), torch.cat(parts))
    with pytest.raises(ValueError, match="expected contiguous float32"):
        softcap_(logits_RV.T, 30.0)
