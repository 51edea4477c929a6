"""What only a CUDA device can show. `make test-gpu` runs this and `tests/unit/kernels/triton`."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """The CUDA device."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return torch.device("cuda")
