"""The combine after the experts, on CUDA devices. T tokens, K top-k, S = T * K, H hidden size."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from expertmesh_kernels.triton.jit import kernel, narrow

BLOCK = 1024


@kernel()
def _combine(
    outputs_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    top_k: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    acc = tl.zeros([BLOCK], tl.float32)
    for slot in range(top_k):
        weight = tl.load(weights_ptr + token * top_k + slot)
        at = (token * top_k + slot) * width + columns
        output = tl.load(outputs_ptr + at, mask=mask, other=0).to(tl.float32)
        acc = tl.fma(tl.zeros([BLOCK], tl.float32) + weight, output, acc)
    tl.store(out_ptr + token * width + columns, narrow(acc, out_ptr.dtype.element_ty), mask=mask)


def combine(outputs_SH: Tensor, weights_TK: Tensor) -> Tensor:
    """See `expertmesh_kernels.combine.combine`: an FP32 chain in slot order, rounded once.

    Args:
        outputs_SH: Contiguous.
        weights_TK: float32, contiguous.
    """
    num_tokens, top_k = weights_TK.shape
    width = outputs_SH.shape[1]
    out_TH = outputs_SH.new_empty(num_tokens, width)
    if num_tokens:
        _combine[(num_tokens, -(-width // BLOCK))](
            outputs_SH, weights_TK, out_TH, top_k, width, BLOCK=BLOCK
        )
    return out_TH
