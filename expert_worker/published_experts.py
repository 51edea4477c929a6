"""Where compiled calls find the weights of resident experts.

The store publishes what changes under its own lock. Experts that come are written beside those
that are there, so that loading holds up no call. What goes is written while `publish` has the
device: when it returns, no compiled call reads the addresses that were there before. So weights may
be freed after that, without a lease.
"""

from __future__ import annotations

import platform
from collections import Counter

import numpy as np
import numpy.typing as npt

from expert_worker.device_turn import DeviceTurn
from expertmesh.model_config import ModelConfig
from expertmesh_kernels.activation import cpu_arguments
from expertmesh_kernels.cpu.forward_call import NUM_EXPERTS, TOP_K
from expertmesh_kernels.cpu.mlp import GATE_UP, NUM_PARTS
from expertmesh_kernels.cpu.serve import (
    ACTIVATION,
    ALPHA,
    LIMIT,
    NUM_LAYER_FIELDS,
    WIDTH,
    Experts,
)
from expertmesh_kernels.cpu.words import put
from expertmesh_kernels.grouped_mlp import ExpertTable

_LONGEST_WAIT_S = 120.0  # for a computation to end
_ORDERED = platform.machine() in ("x86_64", "AMD64")
"""Processors on which what is written in order is seen in order."""
assert GATE_UP == 0, "the address that is written last is the first one"


class PublishedExperts:
    """Tables for `expertmesh_kernels.cpu.serve`. One layer is published at a time.

    Layers whose weights are packed in another way than most are left out: compiled code is made
    for one way, and calls for those go the other way.

    Args:
        config: The model.
        likes: For each MoE layer how its weights are packed: an array as `ExpertTable.like`.
        turn: Of the device that computes.
    """

    def __init__(
        self, config: ModelConfig, likes: dict[int, npt.NDArray[np.generic]], turn: DeviceTurn
    ) -> None:
        self._turn = turn
        shape = config.num_layers, max(1, config.num_experts)
        self._layers_LF = np.zeros((config.num_layers, NUM_LAYER_FIELDS), np.int64)
        self._numbers_LF = np.zeros((config.num_layers, 2), np.float32)
        self._table_LEA = np.zeros((*shape, NUM_PARTS), np.int64)
        kinds = Counter((like.dtype, like.size) for like in likes.values())
        ((dtype, size), _), *_ = kinds.most_common(1)
        self._likes_LB = np.zeros((config.num_layers, size), dtype)
        for layer in config.moe_layers:
            ffn = config.moe_ffn(layer)
            kind, alpha, limit = cpu_arguments(ffn.activation)
            self._layers_LF[layer, NUM_EXPERTS] = ffn.gate.num_experts
            self._layers_LF[layer, TOP_K] = ffn.gate.top_k
            self._layers_LF[layer, ACTIVATION] = kind
            self._numbers_LF[layer, [ALPHA, LIMIT]] = alpha, limit

    @property
    def tables(self) -> Experts:
        """For compiled calls, which read them while they have the device."""
        return self._layers_LF, self._numbers_LF, self._table_LEA, self._likes_LB

    def publish(self, layer: int, experts: ExpertTable) -> None:
        """Replaces the experts of a layer.

        Raises:
            TimeoutError: A computation does not end.
        """
        addresses_EA = np.zeros_like(self._table_LEA[layer])
        fits = bool(experts) and experts.like.dtype == self._likes_LB.dtype
        if fits:
            addresses_EA[: len(experts.addresses_EA)] = experts.addresses_EA
        had_EA = self._table_LEA[layer]
        is_changed_E = (had_EA != addresses_EA).any(axis=1)
        if self._layers_LF[layer, WIDTH] and _ORDERED and not had_EA[is_changed_E].any():
            self._add(layer, np.flatnonzero(is_changed_E), addresses_EA)
        else:
            self._replace(layer, addresses_EA, experts if fits else None)

    def _add(
        self, layer: int, ids_N: npt.NDArray[np.intp], addresses_EA: npt.NDArray[np.int64]
    ) -> None:
        """Adds experts that calls did not find before; they may be looked for meanwhile.

        An expert is there once its first address is, which is written last.
        """
        table_EA = self._table_LEA[layer]
        for expert in ids_N.tolist():
            table_EA[expert, GATE_UP + 1 :] = addresses_EA[expert, GATE_UP + 1 :]
            put(table_EA[expert].ctypes.data, int(addresses_EA[expert, GATE_UP]))

    def _replace(
        self, layer: int, addresses_EA: npt.NDArray[np.int64], experts: ExpertTable | None
    ) -> None:
        """Writes while no compiled call computes."""
        with self._turn.held(_LONGEST_WAIT_S) as is_held:
            if not is_held:
                raise TimeoutError(f"the device was not free within {_LONGEST_WAIT_S:.0f} s")
            self._table_LEA[layer] = addresses_EA
            if experts is not None:
                self._likes_LB[layer] = experts.like
                self._layers_LF[layer, WIDTH] = experts.any_expert.down.in_features
