"""Sampling: determinism, invariance, filters, and logits that are not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh_kernels.sampling import (
    finite_rows,
    sample,
    sample_reference,
    top_logprobs,
    top_logprobs_reference,
)


def draw(
    logits_SV: Tensor,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    min_p: float = 0.0,
    first_position: int = 0,
) -> NDArray[np.int64]:
    """Sample with the same settings for all rows, at successive positions."""
    rows = logits_SV.shape[0]
    return sample(
        logits_SV,
        np.full(rows, temperature, np.float32),
        np.full(rows, min_p, np.float32),
        np.full(rows, top_p, np.float32),
        np.full(rows, top_k, np.int32),
        np.full(rows, seed, np.uint64),
        np.arange(first_position, first_position + rows),
    )


def make_logits(rows: int, vocab_size: int) -> Tensor:
    """Seeded logits."""
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(rows)) * 3


def test_matches_the_reference() -> None:
    """Every mix of settings picks the token that the sort-based reference picks."""
    rng = np.random.default_rng(0)
    logits = make_logits(400, 333).round(decimals=1)
    arguments = (
        rng.choice([0, 0.5, 1, 2], 400).astype(np.float32),
        rng.choice([0, 0.01, 0.3, 1], 400).astype(np.float32),
        rng.choice([1, 0.95, 0.5, 0], 400).astype(np.float32),
        rng.choice([0, 1, 5, 50, 1000], 400).astype(np.int32),
        rng.integers(0, 2**64, 400, np.uint64),
        rng.integers(0, 10_000, 400),
    )
    expected = sample_reference(logits, *arguments)
    np.testing.assert_array_equal(sample(logits, *arguments), expected)


def test_greedy_takes_the_lowest_id_of_equal_maxima() -> None:
    """Temperature 0 is argmax with a defined tie."""
    logits = torch.tensor([[1.0, 5.0, 5.0], [-0.0, 0.0, -1.0]])
    assert draw(logits, temperature=0).tolist() == [1, 0]


def test_a_row_is_independent_of_its_batch() -> None:
    """Alone or in a batch a row gets the same token."""
    logits = make_logits(30, 500)
    together = draw(logits, top_p=0.9, seed=7)
    alone = [draw(logits[s : s + 1], top_p=0.9, seed=7, first_position=s).item() for s in range(30)]
    assert alone == together.tolist()


def test_seed_and_position_change_the_draw() -> None:
    """The noise depends on both, over the whole range of 64-bit seeds."""
    logits = torch.zeros(50, 1000)
    base = draw(logits)
    changes = [{"seed": 1}, {"seed": 2**64 - 1}, {"first_position": 50}]
    for other in (draw(logits, **change) for change in changes):
        assert np.count_nonzero(base == other) < 5


def test_frequencies_follow_the_distribution() -> None:
    """100,000 draws from four probabilities come out within four standard deviations."""
    probabilities = np.array([0.1, 0.2, 0.3, 0.4])
    logits = torch.from_numpy(np.log(probabilities)).float().expand(100_000, 4).contiguous()
    frequencies = np.bincount(draw(logits, seed=11), minlength=4) / 100_000
    bound = 4 * np.sqrt(probabilities * (1 - probabilities) / 100_000)
    assert (np.abs(frequencies - probabilities) < bound).all()


def test_top_k_keeps_the_lowest_ids_of_a_tie() -> None:
    """Of equal logits only the first k can be drawn."""
    logits = torch.zeros(200, 10)
    assert {0, 1, 2} == set(draw(logits, top_k=3).tolist())


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    """Probabilities .5, .3, .2: 0.75 needs two tokens, 0.4 one, 0 still one."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(300, 3).contiguous()
    assert {0, 1} == set(draw(logits, top_p=0.75).tolist())
    assert {0} == set(draw(logits, top_p=0.4).tolist())
    assert {0} == set(draw(logits, top_p=0.0).tolist())
    assert {0, 1, 2} == set(draw(logits, top_p=0.9).tolist())


def test_top_p_counts_what_top_k_left() -> None:
    """After top-k of 2 the probabilities are renormalised: 0.6 is reached by the first alone."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(300, 3).contiguous()
    assert {0} == set(draw(logits, top_k=2, top_p=0.6).tolist())
    assert {0, 1} == set(draw(logits, top_k=2, top_p=0.65).tolist())


def test_min_p_keeps_what_is_likely_enough() -> None:
    """Of .5, .3, .2 a share of 0.5 of the largest is reached by two, 1 by the largest alone."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(300, 3).contiguous()
    assert {0, 1} == set(draw(logits, min_p=0.5).tolist())
    assert {0} == set(draw(logits, min_p=1.0).tolist())
    assert {0, 1, 2} == set(draw(logits, min_p=0.3).tolist())


def test_top_p_counts_what_min_p_left() -> None:
    """Without the last token the first has 0.625, so 0.6 is reached by it alone."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(300, 3).contiguous()
    assert {0} == set(draw(logits, min_p=0.5, top_p=0.6).tolist())
    assert {0, 1} == set(draw(logits, top_p=0.6).tolist())


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0, 1e30, float("inf"), float("nan"), -1.0])
@pytest.mark.parametrize("top_p", [0.0, 0.5, 1.0, float("nan")])
@pytest.mark.parametrize("top_k", [-1, 0, 2, 100])
@pytest.mark.parametrize("min_p", [0.0, 0.5, float("nan"), float("inf")])
def test_any_logits_give_a_token_in_range(
    temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    """NaN and infinities in logits or settings never crash, and NaN is chosen only if all are."""
    special = torch.tensor([0.0, torch.nan, torch.inf, -torch.inf, 3e38])
    logits = torch.cartesian_prod(*[special] * 3)
    tokens = draw(logits, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    chosen = logits[torch.arange(len(tokens)), torch.from_numpy(tokens)]
    is_usable = (logits > -torch.inf).any(dim=1)
    assert bool((chosen[is_usable] > -torch.inf).all())
    assert {0} == set(tokens[~is_usable.numpy()].tolist())


def test_logprobs_match_the_reference() -> None:
    """Chosen and top log probabilities agree with log_softmax; NaN counts as impossible."""
    logits = make_logits(20, 300).round(decimals=1)
    logits[3, 5] = torch.nan
    tokens = np.arange(20)
    expected = top_logprobs_reference(logits, tokens, 7)
    actual = top_logprobs(logits, tokens, 7)
    np.testing.assert_allclose(actual[0], expected[0], atol=1e-5)
    np.testing.assert_array_equal(actual[1], expected[1])
    np.testing.assert_allclose(actual[2], expected[2], atol=1e-5)


def test_logprobs_are_always_finite_and_ids_different() -> None:
    """Whatever the logits hold, values can be sent as JSON and ids don't repeat."""
    special = torch.tensor([0.0, torch.nan, torch.inf, -torch.inf])
    logits = torch.cartesian_prod(*[special] * 3)
    chosen, ids, values = top_logprobs(logits, np.zeros(len(logits), np.int64), 3)
    assert np.isfinite(chosen).all()
    assert np.isfinite(values).all()
    assert all({0, 1, 2} == set(row) for row in ids.tolist())


def test_bad_arguments_are_named() -> None:
    """Too many log probabilities, or logits of another dtype, raise ValueError."""
    with pytest.raises(ValueError, match="num is 4, expected 0 to 3"):
        top_logprobs(torch.zeros(1, 3), np.zeros(1, np.int64), 4)
    with pytest.raises(ValueError, match=r"expected float32 \[S, V\]"):
        draw(torch.zeros(1, 3).bfloat16())


def test_rows_with_anything_that_is_not_finite_are_found() -> None:
    """Wherever it is; large values and sums that overflow are finite."""
    logits = make_logits(8, 333)
    logits[1, 332], logits[3, 0], logits[5, 100] = torch.nan, torch.inf, -torch.inf
    logits[6] = torch.finfo(torch.float32).max
    expected = torch.isfinite(logits).all(dim=1).numpy()
    assert finite_rows(logits).tolist() == expected.tolist()
    assert expected.sum() == 5
