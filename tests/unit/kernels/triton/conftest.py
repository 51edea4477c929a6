"""Triton kernels under Triton's interpreter, on CPU tensors. `tests/gpu` runs the same on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """Where kernels run."""
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    """The interpreter computes with NumPy, which warns of infinities; a GPU does not."""
    with np.errstate(all="ignore"):
        yield
