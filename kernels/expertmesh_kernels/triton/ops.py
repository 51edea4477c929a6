"""The ops as their modules call them for CUDA tensors: indices and settings come from the host.

They are copied to the device beside the kernels, without waiting. What returns host arrays waits
for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh.model_config import Activation, GateConfig
from expertmesh_kernels.triton import attention, combine, grouped_mlp, kv, linear, rope, router
from expertmesh_kernels.triton import sampling as triton_sampling
from expertmesh_kernels.triton.activation import gated_activation, sigmoid_scaled
from expertmesh_kernels.triton.grouped_mlp import MlpTables
from expertmesh_kernels.triton.norm import add_rms_norm, rms_norm, rms_norm_parts_
from expertmesh_kernels.triton.weights import DeviceWeight, plain, table_of

__all__ = ["add_rms_norm", "gated_activation", "rms_norm", "rms_norm_parts_", "sigmoid_scaled"]

if TYPE_CHECKING:
    from expertmesh_kernels.grouped_mlp import ExpertTable
    from expertmesh_kernels.heads import PackedHeads
    from expertmesh_kernels.linear import PackedLinear
    from expertmesh_kernels.paged_attention import AttentionOptions, KvCache
    from expertmesh_kernels.rope import RopeTable
    from expertmesh_kernels.router import Gate


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy of a host array; the device may get it later."""
    tensor = torch.from_numpy(np.array(array, order="C"))
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def run_linear(x_RK: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None) -> Tensor:
    """See `expertmesh_kernels.linear.linear`."""
    weight = device_weight(packed)
    return linear.linear(x_RK, weight.data, weight.bias, out_dtype=out_dtype)


def run_head_linear(x_TnK: Tensor, packed: PackedHeads) -> Tensor:
    """See `expertmesh_kernels.heads.head_linear`."""
    num_heads, _, depth, columns = packed.weight_nPKC.shape
    weight_nKN = packed.weight_nPKC.view(num_heads, depth, columns)
    return linear.head_linear(x_TnK, weight_nKN)


def run_gated_mlp(x_RH: Tensor, alone: ExpertTable, activation: Activation) -> Tensor:
    """See `expertmesh_kernels.grouped_mlp.gated_mlp`; the FFN is expert 0 of a table."""
    return grouped_mlp.gated_mlp(_rows(x_RH), alone.on_device, activation)


def run_grouped_mlp(
    x_RH: Tensor,
    row_of_pair_N: NDArray[np.int64],
    expert_of_pair_N: NDArray[np.int64],
    experts: ExpertTable,
    activation: Activation,
) -> Tensor:
    """See `expertmesh_kernels.grouped_mlp.grouped_mlp`."""
    if not len(expert_of_pair_N):
        return x_RH.new_empty(0, x_RH.shape[1])
    if missing := experts.missing(expert_of_pair_N):
        raise KeyError(f"experts {missing} are not in the table")
    return grouped_mlp.grouped_mlp(
        _rows(x_RH),
        to_device(row_of_pair_N, x_RH.device),
        to_device(expert_of_pair_N.astype(np.int32), x_RH.device),
        experts.on_device,
        activation,
    )


def mlp_tables(experts: ExpertTable) -> MlpTables:
    """Where kernels find the weights of experts: a place for each id up to the largest."""
    both = [
        {expert: device_weight(layer) for expert, layer in layers.items()}
        for layers in (
            {expert: weights.gate_up for expert, weights in experts.items()},
            {expert: weights.down for expert, weights in experts.items()},
        )
    ]
    return MlpTables(*(table_of(weights, len(experts.is_there_E)) for weights in both))


def device_weight(packed: PackedLinear) -> DeviceWeight:
    """A packed weight, of one panel, as kernels take it."""
    if packed.format != "panels" or len(packed.weight) != 1 or packed.paired:
        raise ValueError(f"the weight is packed in {packed.format} for the CPU")
    return plain(packed.weight[0], packed.bias_N)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def run_route(
    logits_TE: Tensor, gate: GateConfig, selection_bias_E: NDArray[np.float32] | None
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """See `expertmesh_kernels.router.route`: ids and weights, on the host."""
    bias = None if selection_bias_E is None else to_device(selection_bias_E, logits_TE.device)
    return _on_host(router.route(_rows(logits_TE), gate, bias))


def run_choose_experts(h_TH: Tensor, gate: Gate) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """See `expertmesh_kernels.router.choose_experts`: ids and weights, on the host."""
    weight, bias_E = device_weight(gate.linear), gate.selection_bias_E
    bias = None if bias_E is None else to_device(bias_E, h_TH.device)
    return _on_host(router.route_rows(_rows(h_TH), weight.data, gate.config, weight.bias, bias))


def _on_host(routing: router.DeviceRouting) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    return routing.topk_ids_TK.cpu().numpy(), routing.topk_weights_TK.cpu().numpy()


def run_combine(outputs_SH: Tensor, weights_TK: NDArray[np.float32]) -> Tensor:
    """See `expertmesh_kernels.combine.combine`."""
    weights = to_device(weights_TK.astype(np.float32), outputs_SH.device)
    return combine.combine(outputs_SH.contiguous(), weights)


def run_rope(x_TnD: Tensor, positions_T: NDArray[np.int32], table: RopeTable) -> None:
    """See `expertmesh_kernels.rope.apply_rope`."""
    cos_LD, sin_LD = (part.to(x_TnD.device) for part in (table.cos_LD, table.sin_LD))
    positions = to_device(positions_T, x_TnD.device)
    rope.apply_rope(x_TnD, positions, cos_LD, sin_LD, interleaved=table.interleaved)


def run_write_kv(k_TnD: Tensor, v_TnD: Tensor, cache: KvCache, slots_T: NDArray[np.int64]) -> None:
    """See `expertmesh_kernels.paged_attention.write_kv`."""
    kv.write_kv(k_TnD, v_TnD, _pages(cache), to_device(slots_T.astype(np.int64), k_TnD.device))


def run_attention(
    q_TnD: Tensor,
    cache: KvCache,
    block_tables_SB: NDArray[np.int32],
    sequence_of_row_T: NDArray[np.int32],
    positions_T: NDArray[np.int32],
    options: AttentionOptions,
) -> Tensor:
    """See `expertmesh_kernels.paged_attention.paged_attention`."""
    target = q_TnD.device
    tiles = plan_tiles(
        sequence_of_row_T, positions_T, q_TnD.shape[1] // cache.layout.num_heads, target
    )
    scores = attention.Scores(
        options.scale, options.value_dim, options.sliding_window, options.softcap,
        None if options.sinks_n is None else options.sinks_n.float(),
    )  # fmt: skip
    return attention.paged_attention(
        q_TnD,
        _pages(cache),
        to_device(block_tables_SB.astype(np.int32), target),
        to_device(sequence_of_row_T.astype(np.int32), target),
        to_device(positions_T.astype(np.int32), target),
        tiles,
        scores,
        int(positions_T.max(initial=0)) + 1,
    )


def plan_tiles(
    sequence_of_row_T: NDArray[np.int32],
    positions_T: NDArray[np.int32],
    group: int,
    device: torch.device,
) -> attention.RowTiles:
    """Runs of rows that programs take together.

    Args:
        sequence_of_row_T: Sequence of each row.
        positions_T: Position of each row.
        group: Query heads per key head.
        device: Where kernels run.
    """
    num_rows = len(positions_T)
    follows = (np.diff(sequence_of_row_T) == 0) & (np.diff(positions_T) == 1)
    begins = np.flatnonzero(np.concatenate([[True], ~follows])[:num_rows])
    max_rows = attention.rows_per_tile(group, prefill=len(begins) < num_rows)
    place = np.arange(num_rows) - np.repeat(begins, np.diff(np.append(begins, num_rows)))
    first_rows = np.flatnonzero(place % max_rows == 0)
    lengths = np.diff(np.append(first_rows, num_rows))
    return attention.RowTiles(
        to_device(first_rows.astype(np.int32), device),
        to_device(lengths.astype(np.int32), device),
        max_rows,
    )


def _pages(cache: KvCache) -> kv.DevicePages:
    return kv.DevicePages(cache.pool, cache.offset, cache.layout, cache.block_size)


def run_sample(
    logits_SV: Tensor,
    temperature_S: NDArray[np.float32],
    min_p_S: NDArray[np.float32],
    top_p_S: NDArray[np.float32],
    top_k_S: NDArray[np.int32],
    seeds_S: NDArray[np.uint64],
    positions_S: NDArray[np.int64],
) -> NDArray[np.int64]:
    """See `expertmesh_kernels.sampling.sample`."""
    arrays: tuple[NDArray[Any], ...] = (
        *(part.astype(np.float32) for part in (temperature_S, min_p_S, top_p_S)),
        top_k_S.astype(np.int32),
        seeds_S.astype(np.uint64).view(np.int64),
        positions_S.astype(np.int64),
    )
    settings = (to_device(array, logits_SV.device) for array in arrays)
    return np.asarray(triton_sampling.sample(logits_SV.contiguous(), *settings).cpu().numpy())
