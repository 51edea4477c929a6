"""Triton kernels, on CPU tensors under Triton's interpreter; `make test-gpu` runs all on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from expertmesh_kernels.triton.jit import IS_INTERPRETED


@pytest.fixture
def device() -> torch.device:
    """Where kernels run."""
    return torch.device("cpu" if IS_INTERPRETED else "cuda")


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    """The interpreter computes with NumPy, which warns of infinities; a GPU does not."""
    with np.errstate(all="ignore"):
        yield
