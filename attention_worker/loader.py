"""Makes a `Model` from a checkpoint: tensors by name in, layer objects out.

Strict: every tensor is used exactly once; the checkpoint's own rules have checked their shapes.
Gates, norms, sinks and the gates of shared experts are FP32 whatever the type of computation.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from attention_worker.layers.attention import Attention, GroupedQueryAttention
from attention_worker.layers.ffn import (
    DenseFfn,
    Ffn,
    MoeFfn,
    PlainSharedExpert,
    SharedExpert,
    WeighedSharedExpert,
)
from attention_worker.layers.heads import Clip, HeadEdit, QueryKeyNorm, Rope, ValueScale
from attention_worker.layers.latent_attention import (
    FullRankQuery,
    LatentAttention,
    LowRankQuery,
    QueryProjection,
)
from attention_worker.layers.logits import LogitsEdit, Softcap
from attention_worker.layers.norm import NoNorm, Norm, RmsNorm
from attention_worker.model import DecoderLayer, Model
from attention_worker.parameters import Parameters
from expertmesh.checkpoint import Checkpoint
from expertmesh.model_config import (
    AttentionConfig,
    DenseFfnConfig,
    GqaConfig,
    LayerConfig,
    MlaConfig,
    ModelConfig,
    MoeFfnConfig,
    RopeConfig,
)
from expertmesh_kernels.grouped_mlp import ExpertWeights
from expertmesh_kernels.heads import pack_heads
from expertmesh_kernels.linear import pack_linear
from expertmesh_kernels.paged_attention import AttentionOptions
from expertmesh_kernels.rope import RopeTable, rope_table
from expertmesh_kernels.router import Gate

_FP32 = torch.float32


def load_model(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> Model:
    """Reads all weights but the experts'. Peak memory: the weights and one packed tensor more.

    Raises:
        CheckpointError: A tensor is missing, left over or unreadable.
    """
    parameters = Parameters(checkpoint, dtype, device)
    model = _Builder(checkpoint.config, parameters, device, max_model_len).model()
    parameters.check_all_taken()
    return model


class _Builder:
    """Puts layer objects together; one rope table per distinct rope configuration."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        device: torch.device,
        max_model_len: int,
    ) -> None:
        self._config = config
        self._parameters = parameters
        self._device = device
        self._max_model_len = max_model_len
        self._rope = cache(self._make_rope)

    def model(self) -> Model:
        """The whole model; the embedding doubles as output projection where they are tied."""
        config, parameters = self._config, self._parameters
        embed_VH = parameters.take("embed")
        tied = config.tie_word_embeddings
        lm_head = pack_linear(embed_VH) if tied else parameters.linear("lm_head")
        return Model(
            config=config,
            dtype=parameters.dtype,
            device=self._device,
            max_model_len=self._max_model_len,
            embed_VH=embed_VH.mul_(self._embedding_scale()),  # the output projection is a copy
            layers=tuple(self._layer(i, layer) for i, layer in enumerate(config.layers)),
            norm=self._norm("norm"),
            lm_head=lm_head,
            logits_edits=self._logits_edits(),
        )

    def _embedding_scale(self) -> Tensor:
        """In the type of computation: that is how transformers rounds it."""
        return torch.tensor(self._config.embedding_scale, dtype=self._parameters.dtype)

    def _logits_edits(self) -> tuple[LogitsEdit, ...]:
        cap = self._config.logits_softcap
        return () if cap is None else (Softcap(cap),)

    def _layer(self, index: int, config: LayerConfig) -> DecoderLayer:
        prefix = f"layers.{index}."
        return DecoderLayer(
            input_norm=self._norm(prefix + "input_norm"),
            attention=self._attention(index, config.attention),
            attention_out_norm=self._out_norm(prefix + "attention_out_norm", config),
            ffn_norm=self._norm(prefix + "ffn_norm"),
            ffn=self._ffn(index, config.ffn),
            ffn_out_norm=self._out_norm(prefix + "ffn_out_norm", config),
        )

    # --- norms ---

    def _norm(self, name: str) -> RmsNorm:
        norm = self._config.norm
        return RmsNorm(self._norm_weight(name), norm.eps, norm.round_first)

    def _out_norm(self, name: str, config: LayerConfig) -> Norm:
        return self._norm(name) if config.out_norms else NoNorm()

    def _norm_weight(self, name: str) -> Tensor:
        return self._parameters.take(name, _FP32) + float(self._config.norm.unit_offset)

    # --- attention ---

    def _attention(self, index: int, config: AttentionConfig) -> Attention:
        if isinstance(config, MlaConfig):
            return self._latent(index, config)
        return self._grouped_query(index, config)

    def _grouped_query(self, index: int, config: GqaConfig) -> GroupedQueryAttention:
        prefix = f"layers.{index}."
        sinks_n = self._parameters.take(prefix + "sinks", _FP32) if config.sinks else None
        return GroupedQueryAttention(
            layer=index,
            config=config,
            qkv=self._parameters.linear(prefix + "qkv", bias=config.qkv_bias),
            edits=tuple(self._head_edits(prefix, config)),
            options=AttentionOptions(
                scale=config.scale,
                value_dim=config.value_dim,
                sliding_window=config.sliding_window,
                softcap=config.softcap,
                sinks_n=sinks_n,
            ),
            o=self._parameters.linear(prefix + "o", bias=config.o_bias),
        )

    def _head_edits(self, prefix: str, config: GqaConfig) -> list[HeadEdit]:
        edits: list[HeadEdit] = []
        if config.qk_norm != "none":
            edits.append(
                QueryKeyNorm(
                    q_weight=self._norm_weight(prefix + "q_norm"),
                    k_weight=self._norm_weight(prefix + "k_norm"),
                    eps=self._config.norm.eps,
                    whole=config.qk_norm == "whole",
                    round_first=self._config.norm.round_first,
                )
            )
        if config.qkv_clip is not None:
            edits.append(Clip(config.qkv_clip))
        edits.append(Rope(self._rope(config.rope)))
        if config.value_scale != 1.0:
            edits.append(ValueScale(config.value_scale))
        return edits

    def _latent(self, index: int, config: MlaConfig) -> LatentAttention:
        prefix = f"layers.{index}."
        kv_up = self._parameters.take(prefix + "kv_b")
        kv_up = kv_up.view(config.num_heads, -1, config.kv_lora_rank)
        k_up, v_up = kv_up[:, : config.nope_head_dim], kv_up[:, config.nope_head_dim :]
        return LatentAttention(
            layer=index,
            config=config,
            query=self._latent_query(prefix, config),
            kv_down=self._parameters.linear(prefix + "kv_a", bias=config.bias),
            kv_norm=self._latent_norm(prefix + "kv_a_norm", config),
            rope=self._rope(config.rope),
            k_up=pack_heads(k_up.transpose(1, 2)),
            options=AttentionOptions(scale=config.scale, value_dim=config.kv_lora_rank),
            v_up=pack_heads(v_up),
            o=self._parameters.linear(prefix + "o", bias=config.bias),
        )

    def _latent_query(self, prefix: str, config: MlaConfig) -> QueryProjection:
        if config.q_lora_rank is None:
            return FullRankQuery(self._parameters.linear(prefix + "q"))
        return LowRankQuery(
            down=self._parameters.linear(prefix + "q_a", bias=config.bias),
            norm=self._latent_norm(prefix + "q_a_norm", config),
            up=self._parameters.linear(prefix + "q_b"),
        )

    def _latent_norm(self, name: str, config: MlaConfig) -> RmsNorm:
        round_first = self._config.norm.round_first
        return RmsNorm(self._norm_weight(name), config.latent_norm_eps, round_first)

    # --- FFN ---

    def _ffn(self, index: int, config: DenseFfnConfig | MoeFfnConfig) -> Ffn:
        prefix = f"layers.{index}."
        if isinstance(config, MoeFfnConfig):
            return self._moe(index, prefix, config)
        weights = self._gated(prefix + "gate_up", prefix + "down", bias=config.bias)
        return DenseFfn(weights, config.activation)

    def _moe(self, index: int, prefix: str, config: MoeFfnConfig) -> MoeFfn:
        gate = config.gate
        selection_bias_E = None
        if gate.selection_bias:
            selection_bias_E = self._parameters.take(prefix + "selection_bias", _FP32).cpu().numpy()
        return MoeFfn(
            layer=index,
            gate=Gate(
                self._parameters.linear(prefix + "gate", bias=gate.bias, dtype=_FP32),
                gate,
                selection_bias_E,
            ),
            shared=self._shared(prefix, config),
        )

    def _shared(self, prefix: str, config: MoeFfnConfig) -> tuple[SharedExpert, ...]:
        if config.shared is None:
            return ()
        weights = self._gated(prefix + "shared_gate_up", prefix + "shared_down", bias=False)
        expert = PlainSharedExpert(weights, config.activation)
        if not config.shared.gated:
            return (expert,)
        gate = self._parameters.linear(prefix + "shared_gate", dtype=_FP32)
        return (WeighedSharedExpert(expert, gate),)

    def _gated(self, gate_up: str, down: str, *, bias: bool) -> ExpertWeights:
        return ExpertWeights(
            gate_up=self._parameters.linear(gate_up, bias=bias, paired=True),
            down=self._parameters.linear(down, bias=bias),
        )

    def _make_rope(self, config: RopeConfig) -> RopeTable:
        return rope_table(config, self._max_model_len).to(self._device)
