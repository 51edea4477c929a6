"""What a model is: an immutable description, made from `config.json` by a family module.

Nothing here knows a family, a file or a device. Shape letters used in the project: T tokens (rows
of a batch), H hidden size, I intermediate size of an FFN, E experts of a layer, K top-k, N pairs
(token, expert), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DtypeName = Literal["float32", "bfloat16", "float16"]
Activation = Literal["silu"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; pairs are (i, i + dim/2) of the rotated dimensions."""

    theta: float
    dim: int
    """Leading dimensions of a head that are rotated."""
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention with optional biases and sliding window."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    scale: float
    """Factor of the scores, usually head_dim ** -0.5."""
    qkv_bias: bool = False
    o_bias: bool = False
    sliding_window: int | None = None
    """Keys that a query sees, itself included; None for all."""

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class DenseFfnConfig:
    """A gated FFN: down(act(gate(x)) * up(x))."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True)
class GateConfig:
    """How the gate network's logits become experts and weights."""

    num_experts: int
    top_k: int
    kind: Literal["softmax_topk"] = "softmax_topk"
    """softmax over all experts in FP32, then top-k."""
    renormalize: bool = True
    """Divide the k weights by their sum."""


@dataclass(frozen=True)
class MoeFfnConfig:
    """Routed experts, each a gated FFN without biases."""

    gate: GateConfig
    intermediate_size: int
    activation: Activation = "silu"

    @property
    def num_experts(self) -> int:
        """Experts of the layer."""
        return self.gate.num_experts


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer: x += attention(norm(x)); x += ffn(norm(x))."""

    attention: AttentionConfig
    ffn: DenseFfnConfig | MoeFfnConfig


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer."""

    family: str
    """Name of the module in `expertmesh.families`."""
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: DtypeName
    """Type of the checkpoint's weights; serving may convert."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        """Layers of all kinds."""
        return len(self.layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts, ascending."""
        return tuple(
            i for i, layer in enumerate(self.layers) if isinstance(layer.ffn, MoeFfnConfig)
        )

    @property
    def num_experts(self) -> int:
        """Experts per MoE layer; 0 for a dense model."""
        return max((self.moe_ffn(i).num_experts for i in self.moe_layers), default=0)

    @property
    def top_k(self) -> int:
        """Experts per token; 0 for a dense model."""
        return max((self.moe_ffn(i).gate.top_k for i in self.moe_layers), default=0)

    def moe_ffn(self, layer: int) -> MoeFfnConfig:
        """The FFN of an MoE layer."""
        ffn = self.layers[layer].ffn
        assert isinstance(ffn, MoeFfnConfig), f"layer {layer} has no experts"
        return ffn
