"""`ModelFacts` as a page to read: sections of aligned lines, always in this order."""

from __future__ import annotations

from collections.abc import Mapping

from expertmesh.model_config import DenseFfnConfig, ModelConfig, MoeFfnConfig
from expertmesh.model_tools.expert_traffic import Traffic
from expertmesh.model_tools.model_facts import ModelFacts
from expertmesh.model_tools.model_words import (
    activation_words,
    attention_kinds,
    attention_pattern,
    attention_words,
    ffn_kinds,
    ffn_pattern,
    gate_words,
    rope_words,
)
from expertmesh.model_tools.token_cost import Work
from expertmesh.model_tools.worker_memory import ExpertShare

Lines = dict[str, str]
Sections = dict[str, Lines]


def facts_sections(facts: ModelFacts) -> Sections:
    """Titles to lines."""
    config = facts.config
    sections = {
        "Model": _model(facts),
        "Attention": _attention(config),
        "KV cache": _kv_cache(facts),
        "FFN": _ffn(config),
        f"Memory for weights, {config.dtype}": _memory(facts),
        f"Each generated token, alone in its batch, at a context of {facts.context}": _token(facts),
    }
    if facts.traffic:
        sections["Network for each token, if gates choose evenly"] = {
            _workers(sent.num_workers): _traffic_words(sent) for sent in facts.traffic
        }
    return sections


def page(sections: Mapping[str, Mapping[str, str]]) -> str:
    """Sections as text; values begin in one column."""
    width = max(len(name) for lines in sections.values() for name in lines)
    blocks = (
        "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in lines.items())])
        for title, lines in sections.items()
    )
    return "\n\n".join(blocks)


def size_words(nbytes: float) -> str:
    """Bytes, in KiB, MiB or GiB."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes:.0f} bytes"


def count_words(count: int) -> str:
    """A number, in millions, billions or trillions: 46.70 B."""
    for unit, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return str(count)


def operation_words(count: int) -> str:
    """Floating-point operations, in MFLOP, GFLOP or TFLOP."""
    for unit, scale in (("TFLOP", 10**12), ("GFLOP", 10**9)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count / 10**6:.2f} MFLOP"


def _model(facts: ModelFacts) -> Lines:
    config, size = facts.config, facts.size
    shared = "shared with" if config.tie_word_embeddings else "apart from"
    tokens = ", ".join(str(token) for token in config.eos_token_ids)
    return {
        "family": config.family,
        "parameters": f"{count_words(size.total)}, {count_words(size.active)} active per token",
        "hidden size": str(config.hidden_size),
        "vocabulary": f"{config.vocab_size} tokens, embedding {shared} the output",
        "context": f"{config.max_position_embeddings} tokens",
        "end tokens": tokens or "none",
    }


def _attention(config: ModelConfig) -> Lines:
    lines = {"layers": f"{config.num_layers}: {attention_pattern(config)}"}
    for kind, label in attention_kinds(config).items():
        lines[label] = attention_words(kind)
        lines[f"{label}, rope"] = rope_words(kind.rope)
    return lines


def _kv_cache(facts: ModelFacts) -> Lines:
    kv = facts.kv_per_token
    lines = {"per token": size_words(kv.total)}
    if kv.window:
        lines["of full layers"] = size_words(kv.full)
        lines["of sliding windows"] = f"{size_words(kv.window)}, within the window only"
    lines[f"{facts.context} tokens"] = size_words(facts.kv_of_context.total)
    return lines


def _ffn(config: ModelConfig) -> Lines:
    lines = {"layers": f"{config.num_layers}: {ffn_pattern(config)}"}
    for ffn, label in ffn_kinds(config).items():
        lines |= _dense(ffn, label) if isinstance(ffn, DenseFfnConfig) else _moe(ffn, label)
    return lines


def _dense(ffn: DenseFfnConfig, label: str) -> Lines:
    bias = ", biases" if ffn.bias else ""
    text = f"{ffn.intermediate_size} neurons, {activation_words(ffn.activation)}{bias}"
    return {label: text}


def _moe(ffn: MoeFfnConfig, label: str) -> Lines:
    bias = ", biases" if ffn.bias else ""
    neurons = f"{ffn.intermediate_size} neurons, {activation_words(ffn.activation)}{bias}"
    lines = {label: f"{ffn.num_experts} experts of {neurons}"}
    lines[f"{label}, gate"] = gate_words(ffn.gate)
    if ffn.shared is not None:
        gated = ", x sigmoid of a gate of its own" if ffn.shared.gated else ""
        lines[f"{label}, shared"] = f"{ffn.shared.intermediate_size} neurons{gated}"
    return lines


def _memory(facts: ModelFacts) -> Lines:
    lines = {"attention worker": size_words(facts.attention_worker_nbytes)}
    if facts.expert_workers:
        lines["one expert"] = f"{size_words(facts.expert_nbytes)} in one layer"
        for share in facts.expert_workers:
            lines[_workers(share.num_workers)] = _share_words(share)
    return lines


def _share_words(share: ExpertShare) -> str:
    fewest, most = share.fewest_experts, share.most_experts
    nbytes, experts = size_words(share.max_nbytes), str(most)
    if fewest != most:
        nbytes, experts = f"{size_words(share.min_nbytes)} to {nbytes}", f"{fewest} to {most}"
    return f"{nbytes} each, {experts} expert{'s' if most != 1 else ''} of a layer"


def _token(facts: ModelFacts) -> Lines:
    token = facts.token
    parts = {"attention worker": token.attention}
    if facts.expert_workers:
        parts |= {"experts": token.experts, "together": token.total}
    return {name: _work_words(work) for name, work in parts.items()}


def _work_words(work: Work) -> str:
    return f"{size_words(work.nbytes)} read, {operation_words(work.operations)}"


def _traffic_words(sent: Traffic) -> str:
    return (
        f"{sent.rows_out:.2f} rows out ({size_words(sent.nbytes_out)}), "
        f"{sent.rows_back} back ({size_words(sent.nbytes_back)})"
    )


def _workers(count: int) -> str:
    return f"{count} expert worker" + ("s" if count > 1 else "")
