"""Tensors that lie in the middle of NaN, so that a read or write beside them is noticed."""

from __future__ import annotations

import torch
from torch import Tensor

_MARGIN = 5


def poisoned(values: Tensor) -> Tensor:
    """A copy on the same device with the last axis contiguous and NaN around it, rows included.

    Args:
        values: Floating dtype, at least one axis.
    """
    *front, width = values.shape
    rows = int(torch.tensor(front).prod()) if front else 1
    around = values.new_full((rows + 2 * _MARGIN, width + 2 * _MARGIN), torch.nan)
    inner = around[_MARGIN : _MARGIN + rows, _MARGIN : _MARGIN + width]
    inner.copy_(values.reshape(rows, width))
    strides, stride = [], width + 2 * _MARGIN
    for size in reversed(front):
        strides.insert(0, stride)
        stride *= size
    return inner.as_strided(values.shape, (*strides, 1))


def is_still_poisoned(view: Tensor) -> bool:
    """Whether what lies around a tensor of `poisoned` is still NaN."""
    around = view.new_empty(0).set_(view.untyped_storage())  # type: ignore[call-overload]
    rest = around.clone()
    rest.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(torch.nan)
    return bool(rest.isnan().all())
