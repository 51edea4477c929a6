"""The weights that families have in common, by their names on the hub.

Each group of templates says with its conditions in which layers its parameters are, so that a
family lists groups and leaves the rest to its config.
"""

from __future__ import annotations

from expertmesh.families.rules import (
    Condition,
    ExpertLayout,
    Ignored,
    ParameterTemplate,
    Source,
    always,
)
from expertmesh.model_config import DenseFfnConfig, LayerConfig, MlaConfig, MoeFfnConfig

LAYER = "model.layers.{layer}."
ATTENTION = LAYER + "self_attn."
MLP = LAYER + "mlp."


def one(
    parameter: str, name: str | tuple[str, ...], dims: str, when: Condition = always
) -> ParameterTemplate:
    """A parameter that is one weight; more names are spellings of it."""
    names = (name,) if isinstance(name, str) else name
    return ParameterTemplate(parameter, (Source(names, dims),), when)


def stacked(
    parameter: str, prefix: str, sources: dict[str, str], when: Condition = always
) -> ParameterTemplate:
    """A parameter that is several weights, one below the other: name after the prefix to shape."""
    parts = tuple(Source((prefix + name,), dims) for name, dims in sources.items())
    return ParameterTemplate(parameter, parts, when)


def _mla(layer: LayerConfig) -> MlaConfig | None:
    return layer.attention if isinstance(layer.attention, MlaConfig) else None


def _has_qkv_bias(layer: LayerConfig) -> bool:
    return layer.gqa.qkv_bias


def _has_o_bias(layer: LayerConfig) -> bool:
    return layer.gqa.o_bias


def _has_sinks(layer: LayerConfig) -> bool:
    return layer.gqa.sinks


def _is_dense(layer: LayerConfig) -> bool:
    return isinstance(layer.ffn, DenseFfnConfig)


def _has_dense_bias(layer: LayerConfig) -> bool:
    return isinstance(layer.ffn, DenseFfnConfig) and layer.ffn.bias


def _is_moe(layer: LayerConfig) -> bool:
    return isinstance(layer.ffn, MoeFfnConfig)


def _has_gate_bias(layer: LayerConfig) -> bool:
    return isinstance(layer.ffn, MoeFfnConfig) and layer.ffn.gate.bias


def _has_selection_bias(layer: LayerConfig) -> bool:
    return isinstance(layer.ffn, MoeFfnConfig) and layer.ffn.gate.selection_bias


def _has_shared(layer: LayerConfig) -> bool:
    return isinstance(layer.ffn, MoeFfnConfig) and layer.ffn.shared is not None


def _has_shared_gate(layer: LayerConfig) -> bool:
    ffn = layer.ffn
    return isinstance(ffn, MoeFfnConfig) and ffn.shared is not None and ffn.shared.gated


def _has_head_norm(layer: LayerConfig) -> bool:
    return layer.gqa.qk_norm == "head"


def _has_whole_norm(layer: LayerConfig) -> bool:
    return layer.gqa.qk_norm == "whole"


def _has_full_q(layer: LayerConfig) -> bool:
    mla = _mla(layer)
    return mla is not None and mla.q_lora_rank is None


def _has_low_rank_q(layer: LayerConfig) -> bool:
    mla = _mla(layer)
    return mla is not None and mla.q_lora_rank is not None


def _has_low_rank_q_bias(layer: LayerConfig) -> bool:
    mla = _mla(layer)
    return mla is not None and mla.q_lora_rank is not None and mla.bias


def _has_latent_bias(layer: LayerConfig) -> bool:
    mla = _mla(layer)
    return mla is not None and mla.bias


MODEL = (
    one("embed", "model.embed_tokens.weight", "VH"),
    one("norm", "model.norm.weight", "H"),
    one("lm_head", "lm_head.weight", "VH"),
)
"""Embedding first, then what comes after the layers."""

INPUT_NORM = one("layers.{layer}.input_norm", LAYER + "input_layernorm.weight", "H")
FFN_NORM = one("layers.{layer}.ffn_norm", LAYER + "post_attention_layernorm.weight", "H")


def gqa(*sinks: str) -> tuple[ParameterTemplate, ...]:
    """Grouped-query attention; more names of the sinks are spellings."""
    sink_names = tuple(ATTENTION + name for name in sinks)
    return (
        stacked(
            "layers.{layer}.qkv",
            ATTENTION,
            {"q_proj.weight": "QH", "k_proj.weight": "KH", "v_proj.weight": "WH"},
        ),
        stacked(
            "layers.{layer}.qkv_bias",
            ATTENTION,
            {"q_proj.bias": "Q", "k_proj.bias": "K", "v_proj.bias": "W"},
            _has_qkv_bias,
        ),
        one("layers.{layer}.q_norm", ATTENTION + "q_norm.weight", "D", _has_head_norm),
        one("layers.{layer}.k_norm", ATTENTION + "k_norm.weight", "D", _has_head_norm),
        one("layers.{layer}.q_norm", ATTENTION + "q_norm.weight", "Q", _has_whole_norm),
        one("layers.{layer}.k_norm", ATTENTION + "k_norm.weight", "K", _has_whole_norm),
        one("layers.{layer}.sinks", sink_names, "N", _has_sinks),
        one("layers.{layer}.o", ATTENTION + "o_proj.weight", "HO"),
        one("layers.{layer}.o_bias", ATTENTION + "o_proj.bias", "H", _has_o_bias),
    )


GQA = gqa("sinks")

MLA = (
    one("layers.{layer}.q", ATTENTION + "q_proj.weight", "QH", _has_full_q),
    one("layers.{layer}.q_a", ATTENTION + "q_a_proj.weight", "AH", _has_low_rank_q),
    one("layers.{layer}.q_a_bias", ATTENTION + "q_a_proj.bias", "A", _has_low_rank_q_bias),
    one("layers.{layer}.q_a_norm", ATTENTION + "q_a_layernorm.weight", "A", _has_low_rank_q),
    one("layers.{layer}.q_b", ATTENTION + "q_b_proj.weight", "QA", _has_low_rank_q),
    one("layers.{layer}.kv_a", ATTENTION + "kv_a_proj_with_mqa.weight", "MH"),
    one("layers.{layer}.kv_a_bias", ATTENTION + "kv_a_proj_with_mqa.bias", "M", _has_latent_bias),
    one("layers.{layer}.kv_a_norm", ATTENTION + "kv_a_layernorm.weight", "L"),
    one("layers.{layer}.kv_b", ATTENTION + "kv_b_proj.weight", "BL"),
    one("layers.{layer}.o", ATTENTION + "o_proj.weight", "HO"),
    one("layers.{layer}.o_bias", ATTENTION + "o_proj.bias", "H", _has_latent_bias),
)
"""Multi-head latent attention."""

DENSE_FFN = (
    stacked(
        "layers.{layer}.gate_up",
        MLP,
        {"gate_proj.weight": "IH", "up_proj.weight": "IH"},
        _is_dense,
    ),
    stacked(
        "layers.{layer}.gate_up_bias",
        MLP,
        {"gate_proj.bias": "I", "up_proj.bias": "I"},
        _has_dense_bias,
    ),
    one("layers.{layer}.down", MLP + "down_proj.weight", "HI", _is_dense),
    one("layers.{layer}.down_bias", MLP + "down_proj.bias", "H", _has_dense_bias),
)
"""The FFN of dense layers."""

ATTENTION_AND_NORMS = (INPUT_NORM, *GQA, FFN_NORM)
"""All of a layer but its FFN."""

DENSE_LAYER = (*ATTENTION_AND_NORMS, *DENSE_FFN)
"""All of a layer, where all layers are dense."""


def gate(*modules: str) -> tuple[ParameterTemplate, ...]:
    """The gate of MoE layers; more names of its module are spellings."""
    names = tuple(LAYER + module for module in modules)
    return (
        one("layers.{layer}.gate", tuple(name + ".weight" for name in names), "EH", _is_moe),
        one("layers.{layer}.gate_bias", tuple(n + ".bias" for n in names), "E", _has_gate_bias),
        one(
            "layers.{layer}.selection_bias",
            tuple(name + ".e_score_correction_bias" for name in names),
            "E",
            _has_selection_bias,
        ),
    )


def shared_expert(module: str, gate_module: str = "") -> tuple[ParameterTemplate, ...]:
    """The shared expert of MoE layers, and its gate if it has one."""
    prefix = f"{MLP}{module}."
    return (
        stacked(
            "layers.{layer}.shared_gate_up",
            prefix,
            {"gate_proj.weight": "SH", "up_proj.weight": "SH"},
            _has_shared,
        ),
        one("layers.{layer}.shared_down", prefix + "down_proj.weight", "HS", _has_shared),
        one("layers.{layer}.shared_gate", f"{MLP}{gate_module}.weight", "1H", _has_shared_gate),
    )


STACKED_EXPERTS = ExpertLayout(
    gate_up=(MLP + "experts.gate_up_proj",), down=MLP + "experts.down_proj"
)
"""How transformers holds experts in memory; some files are saved like this."""

MLP_EXPERTS = (
    ExpertLayout(
        gate_up=(
            MLP + "experts.{expert}.gate_proj.weight",
            MLP + "experts.{expert}.up_proj.weight",
        ),
        down=MLP + "experts.{expert}.down_proj.weight",
    ),
    STACKED_EXPERTS,
)
"""One gated FFN per expert, as on the hub, or stacked."""

ROTARY_BUFFERS = Ignored(
    "model.", "rotary_emb.inv_freq", "a buffer of old exports; recomputed from the config"
)
