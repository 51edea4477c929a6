"""Keys and values in the pool, on CUDA devices. T rows, n heads, D head size.

The layout of blocks is that of `expertmesh_kernels.cpu.pages`: keys of a block transposed,
[n, key_dim, block_size], then values [n, block_size, value_dim]. A pool may be int8; then each
(token, head) has a factor for its key and one for its value.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl
from torch import Tensor

from expertmesh.model_config import KvLayout
from expertmesh_kernels.triton.jit import device, kernel, next_power


@dataclass(frozen=True)
class DevicePages:
    """One layer's keys and values inside the pool."""

    pool: Tensor
    """[num_blocks, block_elements], contiguous."""
    keys_at: int
    """Elements from the start of a block to the layer's keys."""
    layout: KvLayout
    block_size: int
    """Tokens per block."""
    key_scales: Tensor | None = None
    """float32 [num_blocks * block_size, n] of an int8 pool."""
    value_scales: Tensor | None = None
    """Likewise; of a latent, whose values are parts of keys, those of keys are used."""

    @property
    def values_at(self) -> int:
        """Elements from the start of a block to the layer's values."""
        return self.keys_at + self.layout.num_heads * self.layout.key_dim * self.block_size


@device
def _quantized(values: tl.tensor) -> tl.tensor:
    """int8 values, the nearest ones (ties to even), and their factor; 1 if all are 0."""
    wide = values.to(tl.float32)
    peak = tl.max(tl.abs(wide), 0)
    scale = tl.where(peak > 0, peak / 127.0, 1.0)
    shifted = wide / scale + 12582912.0  # 1.5 * 2 ** 23: leaves the nearest integer
    return (shifted - 12582912.0).to(tl.int8), scale


@kernel("k_row", "v_row")
def _write_kv(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    key_scales_ptr: tl.tensor,
    value_scales_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    k_row: tl.tensor,
    v_row: tl.tensor,
    block_stride: tl.tensor,
    keys_at: tl.tensor,
    values_at: tl.tensor,
    num_heads: tl.tensor,
    block_size: tl.tensor,
    key_dim: tl.tensor,
    value_dim: tl.tensor,
    QUANTIZED: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    HAS_VALUES: tl.constexpr,
) -> None:
    """Key and value of one head of one row. A negative slot is that of a row that is padding."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    block, offset = slot // block_size, slot % block_size
    pool_ptr += block * block_stride
    d = tl.arange(0, KEYS)
    key = tl.load(k_ptr + row * k_row + head * key_dim + d, mask=d < key_dim, other=0)
    if QUANTIZED:
        key, scale = _quantized(key)
        tl.store(key_scales_ptr + slot * num_heads + head, scale)
    at = keys_at + (head * key_dim + d) * block_size + offset
    tl.store(pool_ptr + at, key, mask=d < key_dim)
    if HAS_VALUES:
        d = tl.arange(0, VALUES)
        value = tl.load(v_ptr + row * v_row + head * value_dim + d, mask=d < value_dim, other=0)
        if QUANTIZED:
            value, scale = _quantized(value)
            tl.store(value_scales_ptr + slot * num_heads + head, scale)
        at = values_at + (head * block_size + offset) * value_dim + d
        tl.store(pool_ptr + at, value, mask=d < value_dim)


def write_kv(k_TnD: Tensor, v_TnD: Tensor, pages: DevicePages, slots_T: Tensor) -> None:
    """See `expertmesh_kernels.paged_attention.write_kv`.

    Args:
        k_TnD: Rows are contiguous; of the pool's dtype, or any floating one if the pool is int8.
        v_TnD: Likewise.
        pages: Where to.
        slots_T: int64: block * block_size + offset; negative for rows to leave out.
    """
    layout, num_rows = pages.layout, len(k_TnD)
    if not num_rows:
        return
    scales = pages.pool if pages.key_scales is None else pages.key_scales
    _write_kv[(num_rows, layout.num_heads)](
        k_TnD, v_TnD, pages.pool, scales,
        scales if pages.value_scales is None else pages.value_scales, slots_T,
        k_TnD.stride(0), v_TnD.stride(0), pages.pool.shape[1], pages.keys_at, pages.values_at,
        layout.num_heads, pages.block_size, layout.key_dim, layout.value_dim,
        QUANTIZED=pages.key_scales is not None, KEYS=next_power(layout.key_dim),
        VALUES=next_power(layout.value_dim), HAS_VALUES=layout.value_dim > 0, num_warps=1,
    )  # fmt: skip
