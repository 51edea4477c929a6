"""Makes a `Model` from a checkpoint: tensors by name in, layer objects out.

Strict: every tensor is used exactly once; the checkpoint's own rules have checked their shapes.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from attention_worker.layers.attention import Attention
from attention_worker.layers.ffn import DenseFfn, Ffn, MoeFfn
from attention_worker.layers.norm import RmsNorm
from attention_worker.model import DecoderLayer, Model
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import CheckpointError
from expertmesh.model_config import DenseFfnConfig, LayerConfig, ModelConfig, RopeConfig
from expertmesh_kernels.grouped_mlp import ExpertWeights
from expertmesh_kernels.host import to_torch
from expertmesh_kernels.linear import PackedLinear, pack_linear
from expertmesh_kernels.rope import RopeTable, rope_table


def load_model(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> Model:
    """Reads all weights but the experts'. Peak memory: the weights and one packed tensor more.

    Raises:
        CheckpointError: A tensor is missing, left over or unreadable.
    """
    parameters = _Parameters(checkpoint, dtype, device)
    model = _Builder(checkpoint.config, parameters, dtype, device, max_model_len).model()
    parameters.check_all_used()
    return model


class _Parameters:
    """Tensors of the checkpoint; each can be taken once, which frees it here."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._model_dir = checkpoint.model_dir
        self._tensors: dict[str, Tensor] = {
            name: to_torch(host.data, host.dtype, dtype).to(device)
            for name, host in checkpoint.attention_parameters()
        }

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self._model_dir}: parameter {name} is missing")
        return self._tensors.pop(name)

    def check_all_used(self) -> None:
        if self._tensors:
            raise CheckpointError(
                f"{self._model_dir}: parameters without a use: {', '.join(sorted(self._tensors))}"
            )


class _Builder:
    """Puts layer objects together; one rope table per distinct rope configuration."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: _Parameters,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
    ) -> None:
        self._config = config
        self._parameters = parameters
        self._dtype = dtype
        self._device = device
        self._max_model_len = max_model_len
        self._rope = cache(self._make_rope)

    def model(self) -> Model:
        """The whole model; the embedding doubles as output projection where they are tied."""
        embed_VH = self._parameters.take("embed")
        tied = self._config.tie_word_embeddings and "lm_head" not in self._parameters
        return Model(
            config=self._config,
            dtype=self._dtype,
            device=self._device,
            max_model_len=self._max_model_len,
            embed_VH=embed_VH,
            layers=tuple(self._layer(i, layer) for i, layer in enumerate(self._config.layers)),
            norm=self._norm("norm"),
            lm_head=pack_linear(embed_VH) if tied else self._linear("lm_head"),
        )

    def _layer(self, index: int, config: LayerConfig) -> DecoderLayer:
        prefix = f"layers.{index}"
        return DecoderLayer(
            input_norm=self._norm(f"{prefix}.input_norm"),
            attention=self._attention(index, config),
            ffn_norm=self._norm(f"{prefix}.ffn_norm"),
            ffn=self._ffn(index, config),
        )

    def _norm(self, name: str) -> RmsNorm:
        return RmsNorm(self._parameters.take(name), self._config.norm.eps)

    def _attention(self, index: int, config: LayerConfig) -> Attention:
        prefix, attention = f"layers.{index}", config.gqa
        return Attention(
            layer=index,
            config=attention,
            qkv=self._linear(f"{prefix}.qkv", bias=attention.qkv_bias),
            o=self._linear(f"{prefix}.o", bias=attention.o_bias),
            rope=self._rope(attention.rope),
        )

    def _ffn(self, index: int, config: LayerConfig) -> Ffn:
        prefix, ffn = f"layers.{index}", config.ffn
        if isinstance(ffn, DenseFfnConfig):
            gate_up = self._linear(f"{prefix}.gate_up", bias=ffn.bias)
            down = self._linear(f"{prefix}.down", bias=ffn.bias)
            return DenseFfn(ExpertWeights(gate_up=gate_up, down=down), ffn.activation)
        return MoeFfn(index, self._linear(f"{prefix}.gate"), ffn.gate)

    def _linear(self, name: str, *, bias: bool = False) -> PackedLinear:
        """A packed weight; its bias is named after it."""
        bias_N = self._parameters.take(f"{name}_bias") if bias else None
        return pack_linear(self._parameters.take(name), bias_N)

    def _make_rope(self, config: RopeConfig) -> RopeTable:
        return rope_table(config, self._max_model_len).to(self._device)
