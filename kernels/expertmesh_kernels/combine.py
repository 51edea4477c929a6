"""The combine after the experts. T tokens, K top-k, S = T * K slots, H hidden size."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh_kernels.cpu.combine import combine as cpu_combine
from expertmesh_kernels.host import as_array, as_input


def combine(outputs_SH: Tensor, weights_TK: NDArray[np.float32]) -> Tensor:
    """Weighted sum over a token's experts, [T, H], in the dtype of the outputs.

    One FP32 chain acc = fma(weight, output, acc) in slot order, rounded once: which expert worker
    computed an output, and when it arrived, cannot matter.

    Args:
        outputs_SH: Unweighted expert outputs; row t * K + j is top-k slot j of token t.
        weights_TK: Gate weights.
    """
    num_tokens, top_k = weights_TK.shape
    if outputs_SH.shape[0] != num_tokens * top_k:
        raise ValueError(f"{outputs_SH.shape[0]} outputs, expected {num_tokens} * {top_k}")
    if outputs_SH.device.type == "cuda":
        from expertmesh_kernels.triton import ops

        return ops.run_combine(outputs_SH, weights_TK)
    if outputs_SH.device.type != "cpu":
        return combine_reference(outputs_SH, weights_TK)
    out_TH = outputs_SH.new_empty(num_tokens, outputs_SH.shape[1])
    cpu_combine(as_array(outputs_SH), as_input(weights_TK, np.float32), as_array(out_TH))
    return out_TH


def combine_reference(outputs_SH: Tensor, weights_TK: NDArray[np.float32]) -> Tensor:
    """What `combine` computes, in PyTorch."""
    weights = torch.from_numpy(np.array(weights_TK)).to(outputs_SH.device)
    outputs_TKH = outputs_SH.float().view(*weights_TK.shape, outputs_SH.shape[1])
    return (outputs_TKH * weights[:, :, None]).sum(1).to(outputs_SH.dtype)
