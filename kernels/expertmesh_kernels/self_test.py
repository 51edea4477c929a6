"""Start-up self-test: a fingerprint of the numerics of this machine, and proof of invariance.

Two processes with the same fingerprint, for one dtype, may serve copies of the same expert, or
continue each other's requests, without changing a bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh.formats.coded import CodedMatrix, CodeName
from expertmesh.model_config import GELU_TANH, SILU, Activation, DtypeName, KvLayout
from expertmesh_kernels.grouped_mlp import (
    ExpertTable,
    ExpertWeights,
    grouped_mlp,
    pack_coded_expert,
    pack_expert,
)
from expertmesh_kernels.host import TORCH_DTYPES, as_array
from expertmesh_kernels.linear import linear, pack_linear
from expertmesh_kernels.norm import rms_norm, rms_norm_heads_
from expertmesh_kernels.paged_attention import (
    AttentionOptions,
    KvCache,
    paged_attention,
    write_kv,
)

_ACTIVATIONS = (SILU, GELU_TANH, Activation("clamped_swiglu", alpha=1.7, limit=0.5))
_CPU = torch.device("cpu")
_ROWS = 20
_MANY = 80
"""Enough for tiles of many rows, also of each of two experts."""
_HIDDEN = 72
_BLOCKS = 5
_BLOCK_SIZE = 16
_HEADS = 2
_HEAD_DIM = 24


def numerics_fingerprint(dtype: DtypeName, device: torch.device = _CPU) -> bytes:
    """Hash, 16 bytes, of the outputs of fixed inputs through the kernels of a device.

    Args:
        dtype: Of weights and rows. Kernels for others, which take seconds to compile, are left
            alone.
        device: That computes.

    Raises:
        RuntimeError: A row's result depends on the rows beside it, or is not finite.
    """
    return _hash(dtype, _all_outputs(_like(dtype, device)))


def experts_fingerprint(
    dtype: DtypeName,
    device: torch.device = _CPU,
    codes: Sequence[CodeName | None] = (None,),
) -> bytes:
    """The same for the kernels that compute experts, and no others.

    Args:
        dtype: Of rows, and of weights that are plain.
        device: Whose kernels.
        codes: Kinds of codes of the experts' weights; None for plain ones.

    Raises:
        RuntimeError: See `numerics_fingerprint`.
    """
    outputs = (_expert_outputs(_like(dtype, device), kind) for kind in codes)
    return _hash(dtype, chain.from_iterable(outputs))


def _like(dtype: DtypeName, device: torch.device) -> Tensor:
    """An empty tensor that others are made alike, in dtype and device."""
    return torch.empty(0, dtype=TORCH_DTYPES[dtype], device=device)


def _hash(dtype: DtypeName, outputs: Iterable[tuple[str, Tensor]]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for name, output in outputs:
        if not bool(output.isfinite().all()):
            raise RuntimeError(f"self-test: {name} in {dtype} gave values that are not finite")
        digest.update(as_array(output.cpu()).tobytes())
    return digest.digest()


def fixed_values(*shape: int, seed: int = 1) -> Tensor:
    """Values in (-2, 2) from integer arithmetic alone, so equal on every machine; float32."""
    count = int(np.prod(shape))
    state = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(
        0x9E3779B97F4A7C15
    )
    state = (state ^ (state >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (state >> np.uint64(42)).astype(np.int64) - (1 << 21)
    return torch.from_numpy(values.astype(np.float32) * np.float32(2.0**-20)).reshape(shape)


def _all_outputs(like: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Name and result of each op, with its invariance checked."""
    x_RH = _rows(like)
    packed = pack_linear(fixed_values(100, _HIDDEN, seed=2).to(like))
    yield _invariant("linear", lambda rows: linear(x_RH[rows], packed))
    norm_H = fixed_values(_HIDDEN, seed=3).to(like.device)
    yield _invariant("norm", lambda rows: rms_norm(x_RH[rows], norm_H, 1e-5))
    yield _invariant("norm of heads", lambda rows: _norm_heads(x_RH[rows], norm_H))
    yield from _expert_outputs(like, None)
    for name, cache, options in _attention_layers(like):
        yield _invariant(name, partial(_run_attention, cache=cache, options=options))


def _expert_outputs(like: Tensor, codes: CodeName | None) -> Iterator[tuple[str, Tensor]]:
    """Likewise, of the FFNs of experts."""
    pack = _expert if codes is None else partial(_coded_expert, codes)
    x_RH, experts = _rows(like), ExpertTable({e: pack(e, like) for e in range(2)})
    for activation in _ACTIVATIONS:
        run = partial(_run_experts, x_RH, experts=experts, activation=activation)
        yield _invariant(f"grouped_mlp with {activation.kind}", run)


def _rows(like: Tensor) -> Tensor:
    return fixed_values(_ROWS, _HIDDEN).to(like)


def _invariant(name: str, run: Callable[[NDArray[np.int64]], Tensor]) -> tuple[str, Tensor]:
    """All rows at once, compared with the same rows in other company and order."""
    all_rows = np.arange(_ROWS)
    together = run(all_rows)
    many_rows = np.resize(all_rows, _MANY)
    for rows in (all_rows[:1], all_rows[5:9], all_rows[::-1].copy(), many_rows):
        if not torch.equal(run(rows), together[torch.from_numpy(rows)]):
            raise RuntimeError(f"self-test: {name} depends on neighbouring rows")
    return name, together


def _expert(expert: int, like: Tensor) -> ExpertWeights:
    return pack_expert(
        (fixed_values(80, _HIDDEN, seed=4 + expert) / 8).to(like),
        (fixed_values(_HIDDEN, 40, seed=6 + expert) / 8).to(like),
    )


def _coded_expert(codes: CodeName, expert: int, like: Tensor) -> ExpertWeights:
    def matrix(rows: int, columns: int, seed: int) -> CodedMatrix:
        numbers = (fixed_values(rows, columns, seed=seed).numpy() * 60 + 128).astype(np.uint8)
        numbers = numbers % 127 if codes in ("int8", "fp8") else numbers % 16
        scales = np.full((rows, 1), 2.0**-9, np.float32)
        return CodedMatrix(codes, numbers, scales, 0)

    gate_up, down = matrix(80, _HIDDEN, 4 + expert), matrix(_HIDDEN, 40, 6 + expert)
    return pack_coded_expert(gate_up, down, dtype=like.dtype)


def _norm_heads(x_RH: Tensor, norm_H: Tensor) -> Tensor:
    heads_RnD = x_RH.clone().view(len(x_RH), 3, -1)
    rms_norm_heads_(heads_RnD, norm_H[: heads_RnD.shape[2]], 1e-5, whole=False, round_first=False)
    return heads_RnD.flatten(1)


def _run_experts(
    x_RH: Tensor,
    rows: NDArray[np.int64],
    experts: ExpertTable,
    activation: Activation,
) -> Tensor:
    return grouped_mlp(x_RH, rows, rows % len(experts), experts, activation)


def _attention_layers(like: Tensor) -> Iterator[tuple[str, KvCache, AttentionOptions]]:
    """Grouped queries as most models have them, with all options, and over a latent."""
    heads = KvLayout(1, _HEAD_DIM, _HEAD_DIM)
    plain = AttentionOptions(scale=0.25, value_dim=_HEAD_DIM)
    sinks_n = fixed_values(_HEADS, seed=11).to(like.device)
    capped = replace(plain, sliding_window=21, softcap=2.0, sinks_n=sinks_n)
    latent = replace(plain, value_dim=_HEAD_DIM - 8)
    yield "attention", _written_cache(heads, like), plain
    yield "attention with softcap and sinks", _written_cache(heads, like), capped
    yield "attention over a latent", _written_cache(KvLayout(1, _HEAD_DIM, 0), like), latent


def _written_cache(layout: KvLayout, like: Tensor) -> KvCache:
    pool = like.new_zeros(_BLOCKS, layout.width * _BLOCK_SIZE)
    cache = KvCache(pool, 0, layout, _BLOCK_SIZE)
    length = _BLOCKS * _BLOCK_SIZE
    k_TnD = fixed_values(length, 1, layout.key_dim, seed=8).to(like)
    v_TnD = fixed_values(length, 1, layout.value_dim, seed=9).to(like)
    write_kv(k_TnD, v_TnD, cache, np.arange(length))
    return cache


def _run_attention(rows: NDArray[np.int64], cache: KvCache, options: AttentionOptions) -> Tensor:
    """Queries at the last `_ROWS` positions of one sequence."""
    positions_T = (rows + (_BLOCKS * _BLOCK_SIZE - _ROWS)).astype(np.int32)
    q_TnD = fixed_values(_ROWS, _HEADS, _HEAD_DIM, seed=10).to(cache.pool)
    tables_SB = np.arange(_BLOCKS, dtype=np.int32)[None, ::-1].copy()
    sequence_T = np.zeros(len(rows), np.int32)
    out_TnD = paged_attention(
        q_TnD[torch.from_numpy(rows)], cache, tables_SB, sequence_T, positions_T, options
    )
    return out_TnD.flatten(1)
