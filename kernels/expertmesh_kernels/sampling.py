"""From logits to tokens. S rows, V vocabulary.

A row's token depends on its logits, settings, seed and position alone. With w[i] =
exp((logit[i] - max) / temperature) in FP32 and 0 where the logit is NaN or -inf:

1. Temperature 0 (or negative or NaN), or no finite maximum: the lowest id with the largest logit,
   NaN counting as -inf; 0 if all are -inf.
2. Min-p: keep w of at least min_p, where the largest is 1; off for min_p <= 0 or NaN.
3. Top-k: keep the k largest w, ties to the lowest ids; off for k <= 0.
4. Top-p, of what is left: keep the fewest largest w whose sum reaches top_p of the total, at least
   one, ties to the lowest ids; off for top_p >= 1.
5. Gumbel-max in its exponential form: the id with the least -log(u[i]) / w[i], where u[i] is
   (h >> 11 + 1/2) / 2**53 with h = mix(mix(mix(seed + G) ^ position) + i * G), mix the finaliser
   of splitmix64, G = 0x9e3779b97f4a7c15, all modulo 2**64; ties to the lowest id.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh_kernels.cpu.sampling import LOWEST_LOGPROB
from expertmesh_kernels.cpu.sampling import finite_rows as cpu_finite_rows
from expertmesh_kernels.cpu.sampling import sample as cpu_sample
from expertmesh_kernels.cpu.sampling import top_logprobs as cpu_top_logprobs
from expertmesh_kernels.host import as_array, as_input


def sample(
    logits_SV: Tensor,
    temperature_S: NDArray[np.float32],
    min_p_S: NDArray[np.float32],
    top_p_S: NDArray[np.float32],
    top_k_S: NDArray[np.int32],
    seeds_S: NDArray[np.uint64],
    positions_S: NDArray[np.int64],
) -> NDArray[np.int64]:
    """A token id below V for every row, whatever the logits hold.

    Args:
        logits_SV: float32.
        temperature_S: 0 for greedy.
        min_p_S: 0 for all.
        top_p_S: 1 for all.
        top_k_S: 0 for all.
        seeds_S: Seed of the request.
        positions_S: Position of the token to choose in its sequence.
    """
    if logits_SV.device.type == "cuda":
        from expertmesh_kernels.triton import ops

        _check(logits_SV)
        return ops.run_sample(
            logits_SV, temperature_S, min_p_S, top_p_S, top_k_S, seeds_S, positions_S
        )
    tokens_S = np.empty(logits_SV.shape[0], np.int64)
    cpu_sample(
        as_array(_host(logits_SV)), as_input(temperature_S, np.float32),
        as_input(min_p_S, np.float32),
        as_input(top_p_S, np.float32), as_input(top_k_S, np.int32),
        as_input(seeds_S, np.uint64), as_input(positions_S, np.int64), tokens_S,
    )  # fmt: skip
    return tokens_S


def top_logprobs(
    logits_SV: Tensor, token_ids_S: NDArray[np.int64], num: int
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
    """Log softmax of the raw logits: of the given tokens, and of the `num` most likely ones.

    Values are at least -9999, which stands for probability 0. NaN logits count as -inf.

    Args:
        logits_SV: float32.
        token_ids_S: A token for each row.
        num: 0 to V.

    Returns:
        Log probabilities [S], ids [S, num] by descending log probability and ascending id, and
        their log probabilities [S, num].
    """
    num_rows, vocab_size = logits_SV.shape
    if not 0 <= num <= vocab_size:
        raise ValueError(f"num is {num}, expected 0 to {vocab_size}")
    chosen_S = np.empty(num_rows, np.float32)
    ids_SN = np.empty((num_rows, num), np.int64)
    logprobs_SN = np.empty((num_rows, num), np.float32)
    tokens = as_input(token_ids_S, np.int64)
    cpu_top_logprobs(as_array(_host(logits_SV)), tokens, chosen_S, ids_SN, logprobs_SN)
    return chosen_S, ids_SN, logprobs_SN


def finite_rows(logits_SV: Tensor) -> NDArray[np.bool_]:
    """Which rows are free of NaN and infinities, [S].

    Args:
        logits_SV: float32.
    """
    finite_S = np.empty(logits_SV.shape[0], np.bool_)
    cpu_finite_rows(as_array(_host(logits_SV)), finite_S)
    return finite_S


def sample_reference(
    logits_SV: Tensor,
    temperature_S: NDArray[np.float32],
    min_p_S: NDArray[np.float32],
    top_p_S: NDArray[np.float32],
    top_k_S: NDArray[np.int32],
    seeds_S: NDArray[np.uint64],
    positions_S: NDArray[np.int64],
) -> NDArray[np.int64]:
    """What `sample` computes, in PyTorch and NumPy, up to rounding at near-ties."""
    safe_SV = torch.where(logits_SV.isnan(), -torch.inf, logits_SV.float()).cpu()
    tokens = [
        _sample_row_reference(row, float(t), float(m), float(p), int(k), int(seed), int(position))
        for row, t, m, p, k, seed, position in zip(
            safe_SV, temperature_S, min_p_S, top_p_S, top_k_S, seeds_S, positions_S, strict=True
        )
    ]
    return np.array(tokens, np.int64)


def _sample_row_reference(
    logits_V: Tensor,
    temperature: float,
    min_p: float,
    top_p: float,
    top_k: int,
    seed: int,
    position: int,
) -> int:
    top = logits_V.max()
    if not temperature > 0 or not top.isfinite():
        return int(logits_V.argmax())
    weights_V = ((logits_V - top) / temperature).exp().double()
    if min_p > 0:
        weights_V = torch.where(weights_V >= min(min_p, 1.0), weights_V, 0.0)
    order_V = torch.sort(weights_V, descending=True, stable=True).indices
    if 0 < top_k < len(order_V):
        order_V = order_V[:top_k]
    if top_p < 1:
        sums_V = weights_V[order_V].cumsum(0)
        order_V = order_V[: 1 + int((sums_V < max(top_p, 0.0) * sums_V[-1]).sum())]
    uniform_V = torch.from_numpy(_uniform_reference(len(logits_V), seed, position))
    costs_V = torch.full_like(weights_V, torch.inf)
    costs_V[order_V] = -uniform_V[order_V].log() / weights_V[order_V]
    return int(costs_V.argmin())


def _uniform_reference(vocab_size: int, seed: int, position: int) -> NDArray[np.float64]:
    golden = 0x9E3779B97F4A7C15
    key = _mix_reference(np.array([seed + golden & (1 << 64) - 1], np.uint64))
    key = _mix_reference(key ^ np.uint64(position))
    bits_V = _mix_reference(key + np.arange(vocab_size, dtype=np.uint64) * np.uint64(golden))
    return ((bits_V >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mix_reference(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def top_logprobs_reference(
    logits_SV: Tensor, token_ids_S: NDArray[np.int64], num: int
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
    """What `top_logprobs` computes, in PyTorch, for rows with a finite maximum."""
    safe_SV = torch.where(logits_SV.isnan(), -torch.inf, logits_SV).cpu()
    logprobs_SV = safe_SV.log_softmax(-1).clamp(min=float(LOWEST_LOGPROB))
    order_SN = torch.sort(safe_SV, dim=-1, descending=True, stable=True).indices[:, :num]
    chosen_S1 = logprobs_SV.gather(1, torch.from_numpy(np.array(token_ids_S))[:, None])
    return chosen_S1[:, 0].numpy(), order_SN.numpy(), logprobs_SV.gather(1, order_SN).numpy()


def _host(logits_SV: Tensor) -> Tensor:
    _check(logits_SV)
    return logits_SV.cpu()


def _check(logits_SV: Tensor) -> None:
    if logits_SV.dtype != torch.float32 or logits_SV.ndim != 2 or logits_SV.shape[1] == 0:
        raise ValueError(
            f"logits are {logits_SV.dtype} {tuple(logits_SV.shape)}, expected float32 [S, V]"
        )
