"""From rows to experts and weights on CUDA devices. T tokens, H hidden size, E experts, K top-k.

Everything after the logits happens in registers. A tile has a column for each expert; groups of
experts are padded to a power of two, so that a group is an axis of the tile, and padding can never
be chosen. Where the gate is small, one program computes its logits and goes on with them; a large
one (DeepSeek-V3's has 7 MB) would keep a single multiprocessor busy with reading, so its logits are
computed by `linear` first. Which of the two is a matter of the gate's size alone. Each program
counts what it chose, and the sum of these is what `order_by_expert` begins with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from expertmesh.model_config import GateConfig
from expertmesh_kernels.triton.jit import device, dot, kernel, next_power, sigmoid
from expertmesh_kernels.triton.linear import linear

_TOKENS = 16
"""Tokens of a program that computes logits."""
_DEPTH = 32
_SMALL_GATE = 1 << 20
"""Bytes of a gate's weight up to which one program reads it all."""
_LOWEST = tl.constexpr(-(1 << 31))


@dataclass(frozen=True)
class DeviceRouting:
    """The experts chosen for each token, best choice first; ties to the lowest id."""

    topk_ids_TK: Tensor
    """int32."""
    topk_weights_TK: Tensor
    """float32."""
    counts_E: Tensor
    """int32: slots of each expert; `order_by_expert` takes them."""


@device
def _order_bits(values: tl.tensor) -> tl.tensor:
    """Integers in the order of floats; -0 equals 0, and all are above `_LOWEST`."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@device
def _scores(
    logits: tl.tensor, exists: tl.tensor, K: tl.constexpr, SIGMOID: tl.constexpr
) -> tl.tensor:
    """Scores of a tile [tokens, experts]; 1 / K each where a softmax has no finite maximum."""
    if SIGMOID:
        scores = sigmoid(logits)
    else:
        top = tl.max(logits, 1)[:, None]
        is_defined = (top > float("-inf")) & (top < float("inf"))
        parts = tl.exp(logits - tl.where(is_defined, top, 0.0))
        scores = parts / tl.sum(tl.where(is_defined, parts, 1.0), 1)[:, None]
        scores = tl.where(is_defined, scores, 1.0 / K)
    return tl.where(exists, scores, 0.0)


@device
def _open_groups(
    choice: tl.tensor, exists: tl.tensor, num_groups: tl.tensor,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Which experts of a tile are in the best groups."""
    grouped = tl.reshape(tl.where(exists, choice, float("-inf")), [ROWS, GROUPS, SIZE])
    best = tl.max(grouped, 2)
    if TOP2:
        at = tl.argmax(grouped, 2, tie_break_left=True)
        lanes = tl.arange(0, SIZE)[None, None, :]
        rest = tl.where(lanes == at[:, :, None], float("-inf"), grouped)
        best = best + tl.max(rest, 2)
    groups = tl.arange(0, GROUPS)[None, :]
    keys = tl.where(groups < num_groups, _order_bits(best), _LOWEST)
    is_open = tl.zeros([ROWS, GROUPS], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        chosen = groups == tl.argmax(keys, 1, tie_break_left=True)[:, None]
        is_open = tl.where(chosen, 1, is_open)
        keys = tl.where(chosen, _LOWEST, keys)
    wide = tl.broadcast_to(is_open[:, :, None], [ROWS, GROUPS, SIZE])
    return tl.reshape(wide, [ROWS, GROUPS * SIZE]) > 0


@kernel("num_tokens")
def _route(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    gate_bias_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    num_tokens: tl.tensor,
    x_row: tl.tensor,
    H: tl.tensor,
    num_experts: tl.tensor,
    num_groups: tl.tensor,
    eps: tl.tensor,
    scale: tl.tensor,
    HAS_LOGITS: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    K: tl.constexpr,
    K_POWER: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """Experts of some tokens, and how often each was chosen. If HAS_LOGITS, x is the logits."""
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_token = tokens < num_tokens
    lanes = tl.arange(0, GROUPS * SIZE)
    size = num_experts // num_groups
    experts = lanes // SIZE * size + lanes % SIZE
    is_expert = (lanes % SIZE < size) & (lanes // SIZE < num_groups)
    exists = is_expert[None, :]
    x_ptr += tokens.to(tl.int64)[:, None] * x_row
    if HAS_LOGITS:
        mask = is_token[:, None] & exists
        logits = tl.load(x_ptr + experts[None, :], mask=mask, other=0)
    else:
        logits = tl.zeros([ROWS, GROUPS * SIZE], tl.float32)
        for k in range(0, H, DEPTH):
            at = k + tl.arange(0, DEPTH)
            x_mask = is_token[:, None] & (at < H)[None, :]
            x = tl.load(x_ptr + at[None, :], mask=x_mask, other=0).to(tl.float32)
            w_ptrs = w_ptr + at[:, None] * num_experts + experts[None, :]
            w = tl.load(w_ptrs, mask=(at < H)[:, None] & exists, other=0).to(tl.float32)
            logits = dot(x, w, logits)
        if HAS_GATE_BIAS:
            gate_bias = tl.load(gate_bias_ptr + experts, mask=is_expert, other=0)
            logits += gate_bias.to(tl.float32)[None, :]
    logits = tl.where(exists & (logits == logits), logits, float("-inf"))
    scores = _scores(logits, exists, K, SIGMOID)
    choice = scores
    if not (SIGMOID or HAS_BIAS or TOP2):
        choice = logits  # a softmax keeps their order, but for what it rounds alike
    if HAS_BIAS:
        choice += tl.load(bias_ptr + experts, mask=is_expert, other=0)[None, :]
        choice = tl.where(choice == choice, choice, float("-inf"))
    keys = tl.where(exists, _order_bits(choice), _LOWEST)
    if GROUPS > 1:
        is_open = _open_groups(choice, exists, num_groups, GROUPS, SIZE, TOP_GROUPS, TOP2, ROWS)
        keys = tl.where(is_open, keys, _LOWEST)
    slots = tl.arange(0, K_POWER)[None, :]
    ids = tl.zeros([ROWS, K_POWER], tl.int32)
    weights = tl.zeros([ROWS, K_POWER], tl.float32)
    is_chosen = tl.zeros([ROWS, GROUPS * SIZE], tl.int32)
    for slot in tl.static_range(K):
        chosen = lanes[None, :] == tl.argmax(keys, 1, tie_break_left=True)[:, None]
        expert = tl.sum(tl.where(chosen, experts[None, :], 0), 1)[:, None]
        weight = tl.sum(tl.where(chosen, scores, 0.0), 1)[:, None]
        ids = tl.where(slots == slot, expert, ids)
        weights = tl.where(slots == slot, weight, weights)
        is_chosen += chosen.to(tl.int32)
        keys = tl.where(chosen, _LOWEST, keys)
    if RENORMALIZE:
        total = tl.sum(weights, 1)[:, None] + eps
        weights = tl.where(total > 0, weights / tl.where(total > 0, total, 1.0), 1.0 / K)
    at = tokens.to(tl.int64)[:, None] * K + slots
    mask = is_token[:, None] & (slots < K)
    tl.store(ids_ptr + at, ids, mask=mask)
    tl.store(weights_ptr + at, weights * scale, mask=mask)
    counts = tl.sum(tl.where(is_token[:, None], is_chosen, 0), 0)
    tl.store(counts_ptr + tl.program_id(0).to(tl.int64) * num_experts + experts, counts, is_expert)


def route(
    logits_TE: Tensor, gate: GateConfig, selection_bias_E: Tensor | None = None
) -> DeviceRouting:
    """See `expertmesh_kernels.router.route`; float32, rows of logits are contiguous."""
    return _run(logits_TE, None, None, gate, selection_bias_E)


def route_rows(
    x_TH: Tensor,
    weight_HE: Tensor,
    gate: GateConfig,
    gate_bias_E: Tensor | None = None,
    selection_bias_E: Tensor | None = None,
) -> DeviceRouting:
    """The gate's projection, in FP32, and what follows from it.

    Args:
        x_TH: Any floating dtype; rows are contiguous.
        weight_HE: float32, contiguous.
        gate: The gate's equation.
        gate_bias_E: Of the projection, any floating dtype.
        selection_bias_E: float32: added to the scores for the choice.
    """
    if weight_HE.nbytes <= _SMALL_GATE:
        return _run(x_TH, weight_HE, gate_bias_E, gate, selection_bias_E)
    logits_TE = linear(x_TH, weight_HE, gate_bias_E, out_dtype=torch.float32)
    return _run(logits_TE, None, None, gate, selection_bias_E)


def _run(
    x: Tensor,
    weight_HE: Tensor | None,
    gate_bias_E: Tensor | None,
    gate: GateConfig,
    selection_bias_E: Tensor | None,
) -> DeviceRouting:
    num_tokens = x.shape[0]
    ids_TK = x.new_empty(num_tokens, gate.top_k, dtype=torch.int32)
    weights_TK = x.new_empty(num_tokens, gate.top_k, dtype=torch.float32)
    rows = 1 if weight_HE is None else _TOKENS
    num_blocks = -(-num_tokens // rows)
    counts_BE = x.new_empty(num_blocks, gate.num_experts, dtype=torch.int32)
    if not num_tokens:
        return DeviceRouting(ids_TK, weights_TK, counts_BE.sum(0, dtype=torch.int32))
    groups, size = next_power(gate.num_groups), next_power(gate.num_experts // gate.num_groups)
    _route[(num_blocks,)](
        x, x if weight_HE is None else weight_HE, x if gate_bias_E is None else gate_bias_E,
        x if selection_bias_E is None else selection_bias_E, ids_TK, weights_TK,
        counts_BE, num_tokens, x.stride(0), x.shape[1], gate.num_experts, gate.num_groups,
        float(gate.renormalize_eps), float(gate.scale),
        HAS_LOGITS=weight_HE is None, HAS_GATE_BIAS=gate_bias_E is not None,
        HAS_BIAS=selection_bias_E is not None, SIGMOID=gate.scoring == "sigmoid",
        RENORMALIZE=gate.renormalize, GROUPS=groups, SIZE=max(size, 16 // groups),
        TOP_GROUPS=gate.top_groups, TOP2=gate.num_groups > 1 and gate.group_score == "top2_sum",
        K=gate.top_k, K_POWER=next_power(gate.top_k), ROWS=rows, DEPTH=_DEPTH,
        num_warps=1 if weight_HE is None else 4,
    )  # fmt: skip
    return DeviceRouting(ids_TK, weights_TK, counts_BE.sum(0, dtype=torch.int32))
