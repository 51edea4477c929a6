"""Between raw arrays, tensors and what the CPU kernels take.

Kernels see a 16-bit type as bits: bfloat16 as uint16, float16 as int16. The array's dtype tells
them which it is.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh.errors import SettingsError
from expertmesh.model_config import DtypeName

TORCH_DTYPES: dict[DtypeName, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

Scalar = TypeVar("Scalar", bound=np.generic)

_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}

LIKE: dict[torch.dtype, NDArray[np.generic]] = {
    torch.float32: np.empty(0, np.float32),
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float16: np.empty(0, np.int16),
}
"""Empty arrays of the types that kernels see. What is called for every layer takes addresses and
one of these: that costs a tenth of turning tensors into arrays."""


def find_device(name: str) -> torch.device:
    """The device that torch calls so.

    Raises:
        SettingsError: There is no such device here, or none that holds a model.
    """
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise ValueError(name)
        torch.empty(1, device=device)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise SettingsError(
            f"device is {name!r}, which this machine or this build of torch does not have",
            fix="use cpu, or cuda with a build of torch for it",
        ) from error
    return device


def to_torch(array: NDArray[np.generic], stored: DtypeName, dtype: torch.dtype) -> Tensor:
    """Copy a raw host array into a tensor of its own memory.

    Args:
        array: Any shape; bfloat16 as uint16, else the real dtype. May be read-only.
        stored: What the array holds.
        dtype: Floating dtype of the tensor.
    """
    is_shared = array.flags.writeable and array.flags.c_contiguous  # else there is a copy already
    bits = torch.from_numpy(array if is_shared else np.array(array, order="C"))
    stored_dtype = TORCH_DTYPES[stored]
    values = bits if bits.dtype == stored_dtype else bits.view(stored_dtype)
    return values.to(dtype, copy=is_shared)


def as_array(tensor: Tensor) -> NDArray[Any]:
    """The memory of a contiguous CPU tensor as kernels see it; a tensor that isn't is copied."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    bits = _BITS.get(tensor.dtype)
    return (tensor if bits is None else tensor.view(bits)).numpy()


def address(array: NDArray[np.generic]) -> int:
    """Of the memory of an array, which its owner keeps; 0 if it is empty."""
    return int(array.ctypes.data) if array.size else 0


def as_rows(tensor: Tensor) -> tuple[NDArray[Any], int]:
    """The memory of a tensor [T, ...] with contiguous rows, flat, and the distance of two rows.

    A column slice of a larger tensor is not copied, so kernels can write through it.

    Raises:
        ValueError: The elements of one row are not adjacent in memory.
    """
    num_rows = tensor.shape[0]
    row_len = tensor[0].numel() if num_rows else 0
    stride = tensor.stride(0) if num_rows > 1 else row_len
    if num_rows and not tensor[0].is_contiguous():
        raise ValueError(f"strides are {tensor.stride()}, expected contiguous rows")
    span = (num_rows - 1) * stride + row_len if num_rows else 0
    return as_array(tensor.as_strided((span,), (1,))), stride


def row_stride(tensor: Tensor) -> int:
    """Elements from row to row of a tensor [T, n, D] whose rows are contiguous.

    Raises:
        ValueError: The elements of one row are not adjacent in memory.
    """
    _, num_heads, width = tensor.shape
    row, head, element = tensor.stride()
    if (width > 1 and element != 1) or (num_heads > 1 and head != width and width > 0):
        raise ValueError(f"strides are {tensor.stride()}, expected contiguous rows")
    return row


def as_heads(tensor: Tensor) -> tuple[NDArray[Any], tuple[int, int]]:
    """The memory of a tensor [T, n, D], flat, and the distances of two rows and of two heads.

    A column slice of a larger tensor, or a part of every head, is not copied.

    Raises:
        ValueError: The elements of one head are not adjacent in memory.
    """
    num_rows, num_heads, width = tensor.shape
    if tensor.stride(2) != 1 and width > 1:
        raise ValueError(f"strides are {tensor.stride()}, expected contiguous heads")
    row_stride, head_stride = tensor.stride(0), tensor.stride(1)
    span = (num_rows - 1) * row_stride + (num_heads - 1) * head_stride + width
    flat = tensor.as_strided((span if tensor.numel() else 0,), (1,))
    return as_array(flat), (row_stride, head_stride)


def as_input(array: NDArray[np.generic], dtype: type[Scalar]) -> NDArray[Scalar]:
    """An array as kernels expect their index inputs: of the dtype, contiguous and writable.

    A read-only array is another type to Numba and would compile the kernel again.
    """
    if array.dtype == dtype and array.flags.carray:
        return array  # type: ignore[return-value]
    converted = np.ascontiguousarray(array, dtype)
    return converted if converted.flags.writeable else converted.copy()
