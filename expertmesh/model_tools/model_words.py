"""A model's parts in words: layer pattern, attention, rope, gate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from expertmesh.model_config import (
    Activation,
    AttentionConfig,
    DenseFfnConfig,
    GateConfig,
    GqaConfig,
    MlaConfig,
    ModelConfig,
    MoeFfnConfig,
    RopeConfig,
)

T = TypeVar("T", bound=Hashable)

FfnConfig = DenseFfnConfig | MoeFfnConfig

Run = tuple[str, int]
"""A word and how often it comes in a row."""


def pattern(words: Iterable[str]) -> str:
    """A sequence of words, shortened: `4 x (5 x sliding 1024, 1 x full), 2 x sliding 1024`."""
    runs = _runs(words)
    parts = []
    while runs:
        length, repeats = _longest_repeat(runs)
        inner = ", ".join(f"{count} x {word}" for word, count in runs[:length])
        parts.append(inner if repeats == 1 else f"{repeats} x ({inner})")
        runs = runs[length * repeats :]
    return ", ".join(parts)


def _runs(words: Iterable[str]) -> list[Run]:
    runs: list[Run] = []
    for word in words:
        if runs and runs[-1][0] == word:
            runs[-1] = word, runs[-1][1] + 1
        else:
            runs.append((word, 1))
    return runs


def _longest_repeat(runs: Sequence[Run]) -> tuple[int, int]:
    """Length and number of the repeats at the beginning that cover most; (1, 1) for none."""
    best = (1, 1)
    for length in range(2, len(runs) // 2 + 1):
        repeats = 1
        while (
            runs[repeats * length : (repeats + 1) * length] == runs[:length]
        ):  # a slice beyond the end is shorter, so unequal
            repeats += 1
        if repeats > 1 and length * repeats > math.prod(best):
            best = length, repeats
    return best


def attention_kinds(config: ModelConfig) -> dict[AttentionConfig, str]:
    """The different attentions of a model with a label each, in the order of the layers."""
    return _labelled((layer.attention for layer in config.layers), _attention_label)


def ffn_kinds(config: ModelConfig) -> dict[FfnConfig, str]:
    """The different FFNs of a model with a label each, in the order of the layers."""
    return _labelled((layer.ffn for layer in config.layers), _ffn_label)


def attention_pattern(config: ModelConfig) -> str:
    """Which layers have which attention."""
    kinds = attention_kinds(config)
    return pattern(kinds[layer.attention] for layer in config.layers)


def ffn_pattern(config: ModelConfig) -> str:
    """Which layers have a dense FFN and which have experts."""
    kinds = ffn_kinds(config)
    return pattern(kinds[layer.ffn] for layer in config.layers)


def _labelled(items: Iterable[T], label: Callable[[T], str]) -> dict[T, str]:
    """Different items in order; of those with the same label, all but the first get a number."""
    kinds = list(dict.fromkeys(items))
    labels = [label(kind) for kind in kinds]
    seen = Counter[str]()
    for index, text in enumerate(labels):
        seen[text] += 1
        if seen[text] > 1:
            labels[index] = f"{text} ({seen[text]})"
    return dict(zip(kinds, labels, strict=True))


def _attention_label(attention: AttentionConfig) -> str:
    if isinstance(attention, MlaConfig):
        return "latent"
    return f"sliding {attention.sliding_window}" if attention.sliding_window else "full"


def _ffn_label(ffn: FfnConfig) -> str:
    return f"dense {ffn.intermediate_size}" if isinstance(ffn, DenseFfnConfig) else "MoE"


def attention_words(attention: AttentionConfig) -> str:
    """Heads, dimensions and what is special."""
    match attention:
        case GqaConfig():
            return ", ".join([_gqa_heads(attention), *_gqa_extras(attention)])
        case MlaConfig():
            return ", ".join(_mla(attention))


def _gqa_heads(attention: GqaConfig) -> str:
    text = (
        f"{attention.num_heads} query heads, {attention.num_kv_heads} key/value heads "
        f"of {attention.head_dim}"
    )
    if attention.value_dim != attention.head_dim:
        text += f" (values {attention.value_dim})"
    return text


def _gqa_extras(attention: GqaConfig) -> Iterable[str]:
    if attention.sliding_window is not None:
        yield f"window {attention.sliding_window}"
    if attention.qk_norm != "none":
        each = "each head" if attention.qk_norm == "head" else "all heads at once"
        yield f"norm of queries and keys over {each}"
    if attention.qkv_clip is not None:
        yield f"q, k, v clipped at {attention.qkv_clip:g}"
    if attention.value_scale != 1:
        yield f"values x {attention.value_scale:g}"
    if attention.softcap is not None:
        yield f"softcap {attention.softcap:g}"
    if attention.sinks:
        yield "sinks"
    if attention.qkv_bias or attention.o_bias:
        names = [*(["qkv"] * attention.qkv_bias), *(["o"] * attention.o_bias)]
        yield f"bias of {' and '.join(names)}"


def _mla(attention: MlaConfig) -> Iterable[str]:
    yield (
        f"{attention.num_heads} heads of {attention.nope_head_dim} + "
        f"{attention.rope_head_dim} with rope (values {attention.value_dim})"
    )
    yield f"latent {attention.kv_lora_rank}"
    rank = attention.q_lora_rank
    yield "full query projection" if rank is None else f"query rank {rank}"
    if attention.bias:
        yield "biases"


def rope_words(rope: RopeConfig) -> str:
    """Kind, theta, and what of a head it turns."""
    text = f"{rope.kind}, theta {rope.theta:.15g}, {rope.dim} dimensions"
    if rope.kind != "default":
        text += f", factor {rope.factor:g}"
    return text + (", interleaved" if rope.interleaved else "")


def activation_words(activation: Activation) -> str:
    """Name, with its numbers where it has some."""
    if activation.kind != "clamped_swiglu":
        return activation.kind
    return f"{activation.kind} (alpha {activation.alpha:g}, limit {activation.limit:g})"


def gate_words(gate: GateConfig) -> str:
    """How logits become experts and weights, step by step."""
    return ", ".join(_gate_steps(gate))


def _gate_steps(gate: GateConfig) -> Iterable[str]:
    yield f"{gate.scoring} of the logits" + (" with bias" if gate.bias else "")
    if gate.selection_bias:
        yield "+ selection bias to choose by"
    if gate.num_groups > 1:
        score = "best" if gate.group_score == "max" else "sum of the 2 best"
        yield f"top {gate.top_groups} of {gate.num_groups} groups by the {score} of each"
    yield f"top {gate.top_k} of {gate.num_experts}"
    if gate.renormalize:
        eps = f" + {gate.renormalize_eps:g}" if gate.renormalize_eps else ""
        yield f"scores / (their sum{eps})" if eps else "scores / their sum"
    else:
        yield "scores as they are"
    if gate.scale != 1:
        yield f"x {gate.scale:g}"
