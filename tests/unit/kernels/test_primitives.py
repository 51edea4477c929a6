"""Our exp, tanh and log against NumPy in double precision."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.primitives import exp, log, tanh


@njit
def exp_of(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The kernel's exp of each value."""
    result = np.empty_like(values)
    for i in range(values.size):
        result[i] = exp(values[i])
    return result


@njit
def tanh_of(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The kernel's tanh of each value."""
    result = np.empty_like(values)
    for i in range(values.size):
        result[i] = tanh(values[i])
    return result


@njit
def log_of(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The kernel's log of each value."""
    result = np.empty_like(values)
    for i in range(values.size):
        result[i] = log(values[i])
    return result


def test_exp_is_within_two_ulp() -> None:
    """Relative error over the normal range stays below 2 units in the last place."""
    values = np.linspace(-87, 88.7, 200_001).astype(np.float32)
    expected = np.exp(values.astype(np.float64))
    assert np.max(np.abs(exp_of(values) - expected) / expected) < 2 * 2.0**-23


def test_exp_of_special_values() -> None:
    """Zero, infinities, NaN, overflow and gradual underflow behave as in IEEE libraries."""
    values = np.array([0, -0.0, np.inf, -np.inf, np.nan, 89, -200, -103], np.float32)
    expected = np.array([1, 1, np.inf, 0, np.nan, np.inf, 0, 2.0**-149], np.float32)
    np.testing.assert_array_equal(exp_of(values), expected)


def test_a_value_has_the_same_bits_in_any_vector() -> None:
    """Vector lanes and remainder loops compute the same."""
    values = np.linspace(-20, 20, 101).astype(np.float32)
    alone = np.concatenate([exp_of(values[i : i + 1].copy()) for i in range(values.size)])
    np.testing.assert_array_equal(exp_of(values), alone)


def test_tanh_is_within_three_ulp() -> None:
    """Also where it is nearly x, at the seam of its two forms, and where it is nearly 1."""
    seam = np.nextafter(np.full(2, 0.625, np.float32), np.array([0, 1], np.float32))
    small = 2.0 ** -np.arange(1, 120)
    values = np.concatenate([np.linspace(-12, 12, 200_000), seam, small]).astype(np.float32)
    expected = np.tanh(values.astype(np.float64))
    assert np.max(np.abs((tanh_of(values) - expected) / expected)) < 3 * 2.0**-24


def test_tanh_of_special_values() -> None:
    """Zero is zero, large values give 1, NaN stays."""
    values = np.array([0, np.inf, -np.inf, np.nan, 1e-45, 3e38], np.float32)
    expected = np.array([0, 1, -1, np.nan, 1e-45, 1], np.float32)
    np.testing.assert_array_equal(tanh_of(values), expected)


def test_log_is_accurate_on_the_unit_interval() -> None:
    """Relative error stays below 1e-15, also next to 1 and for tiny values."""
    near_one = 1 - 2.0 ** -np.arange(1, 54)
    tiny = 2.0 ** -np.arange(1, 55)
    values = np.concatenate([np.linspace(0.001, 0.999, 10_001), near_one, tiny])
    expected = np.log(values)
    assert np.max(np.abs((log_of(values) - expected) / expected)) < 1e-15
