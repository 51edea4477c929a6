"""What a model is: an immutable description, made from `config.json` by a family module.

Nothing here knows a family, a file or a device. Shape letters used in the project: T tokens (rows
of a batch), H hidden size, I intermediate size of an FFN, E experts of a layer, K top-k, N pairs
(token, expert), V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

DtypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Activation:
    """What a gated FFN does with gate(x) and up(x), in FP32.

    silu             gate * sigmoid(gate) * up
    gelu_tanh        gelu(gate) * up, GELU in its tanh form
    clamped_swiglu   g = min(gate, limit), u = clamp(up, -limit, limit):
                     (u + 1) * g * sigmoid(alpha * g)
    """

    kind: Literal["silu", "gelu_tanh", "clamped_swiglu"]
    alpha: float = 1.0
    limit: float = math.inf


SILU = Activation("silu")
GELU_TANH = Activation("gelu_tanh")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding."""

    theta: float
    dim: int
    """Leading dimensions of a head that are rotated."""
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0
    interleaved: bool = False
    """Pairs are (2i, 2i + 1); else (i, i + dim / 2)."""
    beta_fast: float = 32.0
    """yarn: turns within the original context from which on a frequency is kept."""
    beta_slow: float = 1.0
    """yarn: turns up to which a frequency is divided by `factor`."""
    truncate: bool = True
    """yarn: the ends of the ramp between the two are rounded to whole dimensions."""
    attention_factor: float = 1.0
    """Factor of cosines and sines."""


@dataclass(frozen=True)
class KvLayout:
    """What a layer remembers of a token."""

    num_heads: int
    key_dim: int
    value_dim: int
    """0 if values are the leading part of the keys (a latent)."""

    @property
    def width(self) -> int:
        """Elements per token."""
        return self.num_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class GqaConfig:
    """Grouped-query attention. In the order of computation: q, k, v projections with optional
    biases, qk-norm, clip, rope, value scale, scores, softcap, softmax with sinks, o projection."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Of queries and keys."""
    rope: RopeConfig
    scale: float
    """Factor of the scores, usually head_dim ** -0.5."""
    qkv_bias: bool = False
    o_bias: bool = False
    sliding_window: int | None = None
    """Keys that a query sees, itself included; None for all."""
    value_head_dim: int | None = None
    """Of values; None for head_dim."""
    qk_norm: Literal["none", "head", "whole"] = "none"
    """RMS norm of queries and keys before rope: of each head, or of all heads of a row at once."""
    qkv_clip: float | None = None
    """q, k and v are clamped to [-clip, clip]."""
    value_scale: float = 1.0
    """Factor of the values."""
    softcap: float | None = None
    """Scores become cap * tanh(score / cap)."""
    sinks: bool = False
    """Each head has a learned logit that takes part in the softmax and has no value."""

    @property
    def value_dim(self) -> int:
        """Size of a value head."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def k_size(self) -> int:
        """Width of all key heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def v_size(self) -> int:
        """Width of all value heads together."""
        return self.num_kv_heads * self.value_dim

    @property
    def out_size(self) -> int:
        """Width of all heads' outputs together."""
        return self.num_heads * self.value_dim

    @property
    def kv(self) -> KvLayout:
        """What is remembered of a token."""
        return KvLayout(self.num_kv_heads, self.head_dim, self.value_dim)


@dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    A token's keys and values are projections of one latent, which is what is remembered, beside
    a key part with rope that all heads share. Heads attend to the latent itself: the projections
    are absorbed into queries and outputs.
    """

    num_heads: int
    q_lora_rank: int | None
    """Rank of the query projection; None if it is one full matrix."""
    kv_lora_rank: int
    """Width of the latent."""
    nope_head_dim: int
    """Dimensions of a query head without rope."""
    rope_head_dim: int
    """Dimensions of a query head with rope."""
    value_dim: int
    """Dimensions of a value head."""
    rope: RopeConfig
    scale: float
    latent_norm_eps: float = 1e-6
    """Of the norms of the latents; those of the layers have their own."""
    bias: bool = False
    """Of the projections to the latents and to the output."""

    @property
    def sliding_window(self) -> None:
        """Everything is seen."""
        return None

    @property
    def q_head_dim(self) -> int:
        """Dimensions of a query head."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.q_head_dim

    @property
    def kv_b_size(self) -> int:
        """Width of all heads' keys without rope and values, as projected from the latent."""
        return self.num_heads * (self.nope_head_dim + self.value_dim)

    @property
    def out_size(self) -> int:
        """Width of all heads' outputs together."""
        return self.num_heads * self.value_dim

    @property
    def kv(self) -> KvLayout:
        """What is remembered of a token: latent, then the key part with rope."""
        return KvLayout(1, self.kv_lora_rank + self.rope_head_dim, 0)


AttentionConfig = GqaConfig | MlaConfig


@dataclass(frozen=True)
class DenseFfnConfig:
    """A gated FFN: down(act(gate(x), up(x)))."""

    intermediate_size: int
    activation: Activation = SILU
    bias: bool = False


@dataclass(frozen=True)
class GateConfig:
    """How the gate network's logits become experts and weights, all in FP32.

        scores   = scoring(logits)
        choice   = scores + selection bias       (the bias chooses, it does not weigh)
        experts  = top-k of choice, within the `top_groups` groups of the best group score
        weights  = scores of the experts [/ (their sum + renormalize_eps)] * scale

    A softmax over the top-k logits is softmax scoring with `renormalize`.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    """Divide the k weights by their sum."""
    renormalize_eps: float = 0.0
    scale: float = 1.0
    bias: bool = False
    """The gate's projection has a bias."""
    selection_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    """Score of a group of experts: its best choice, or the sum of its two best ones."""


@dataclass(frozen=True)
class SharedExpertConfig:
    """A gated FFN that every token visits; it is added to the routed experts."""

    intermediate_size: int
    gated: bool = False
    """Its output is multiplied by sigmoid(gate(x)), one number per row."""


@dataclass(frozen=True)
class MoeFfnConfig:
    """Routed experts, each a gated FFN, and perhaps a shared one."""

    gate: GateConfig
    intermediate_size: int
    activation: Activation = SILU
    """Of routed and shared experts."""
    bias: bool = False
    """Of the routed experts."""
    shared: SharedExpertConfig | None = None

    @property
    def num_experts(self) -> int:
        """Experts of the layer."""
        return self.gate.num_experts


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer: x += attention(norm(x)); x += ffn(norm(x))."""

    attention: AttentionConfig
    ffn: DenseFfnConfig | MoeFfnConfig
    out_norms: bool = False
    """What attention and FFN add to x is normalised too."""

    @property
    def gqa(self) -> GqaConfig:
        """The attention of a layer with grouped-query attention."""
        assert isinstance(self.attention, GqaConfig), "the layer has latent attention"
        return self.attention


@dataclass(frozen=True)
class NormConfig:
    """RMS normalisation."""

    eps: float
    unit_offset: bool = False
    """The factor is 1 + weight."""
    round_first: bool = True
    """x / rms(x) is rounded to the model's dtype before it is multiplied by the weight."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer."""

    family: str
    """Name of the module in `expertmesh.families`."""
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: DtypeName
    """Type of the checkpoint's weights; serving may convert."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    embedding_scale: float = 1.0
    """Factor of the embeddings, rounded to the model's dtype first."""
    logits_softcap: float | None = None
    """Logits become cap * tanh(logit / cap)."""

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
