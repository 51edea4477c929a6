"""What Triton's interpreter computes dot products with: numpy, and so a BLAS."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

_ROWS = (1, 2, 4, 8, 16, 32)
_SIZES = (16, 32, 64, 128)


@cache
def rows_have_bits_of_their_own() -> bool:
    """False if numpy gives a row other bits when there are other rows beside it, as OpenBLAS does
    on some processors: then nothing under the interpreter has the same bits in any batch."""
    rng = np.random.default_rng(0)
    for depth in _SIZES:
        for width in _SIZES:
            left = rng.standard_normal((64, depth), np.float32)
            right = rng.standard_normal((depth, width), np.float32)
            whole = left @ right
            if any(not np.array_equal(left[:rows] @ right, whole[:rows]) for rows in _ROWS):
                return False
    return True


needs_bits_of_rows = pytest.mark.skipif(
    not rows_have_bits_of_their_own(),
    reason="numpy's matrix product on this processor gives a row other bits in another batch",
)
