"""A page of facts about a model folder, after checking it as strictly as serving does."""

from __future__ import annotations

from pathlib import Path

from expertmesh.checkpoint import Checkpoint
from expertmesh.model_config import ModelConfig, RopeConfig
from expertmesh.safetensors_file import STORAGE


def inspect_model(model_dir: Path) -> str:
    """What the model is and what its parts weigh, as aligned lines.

    Raises:
        CheckpointError: the folder cannot be served.
    """
    checkpoint = Checkpoint.open(model_dir)
    try:
        facts = {**_architecture(checkpoint.config), **_weights(checkpoint)}
    finally:
        checkpoint.close()
    width = max(len(name) for name in facts)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts.items())


def _architecture(config: ModelConfig) -> dict[str, str]:
    layer = config.layers[0]
    attention = layer.gqa
    window = attention.sliding_window
    return {
        "family": config.family,
        "layers": str(config.num_layers),
        "hidden size": str(config.hidden_size),
        "attention": f"{attention.num_heads} query heads, {attention.num_kv_heads} key/value heads "
        f"of {attention.head_dim}" + (f", window {window}" if window else ""),
        "rope": _rope(attention.rope),
        "FFN": f"{layer.ffn.intermediate_size} neurons" + _experts(config),
        "vocabulary": f"{config.vocab_size} tokens, embedding "
        + ("shared with" if config.tie_word_embeddings else "apart from")
        + " the output",
        "context": f"{config.max_position_embeddings} tokens",
        "end tokens": ", ".join(str(token) for token in config.eos_token_ids) or "none",
    }


def _rope(rope: RopeConfig) -> str:
    scaling = "" if rope.kind == "default" else f", factor {rope.factor:g}"
    return f"{rope.kind}, theta {rope.theta:g}{scaling}"


def _experts(config: ModelConfig) -> str:
    if not config.moe_layers:
        return ", dense"
    return f" in each of {config.num_experts} experts, top-{config.top_k}"


def _weights(checkpoint: Checkpoint) -> dict[str, str]:
    config = checkpoint.config
    item = STORAGE[config.dtype].itemsize
    attention, expert = checkpoint.attention_nbytes(), checkpoint.expert_nbytes()
    experts = expert * config.num_experts * len(config.moe_layers)
    active = attention + expert * config.top_k * len(config.moe_layers)
    facts = {
        "weights": f"{config.dtype}, {_size(attention + experts)}",
        "parameters": f"{_millions((attention + experts) // item)}, "
        f"{_millions(active // item)} active per token",
        "attention worker": _size(attention),
    }
    if experts:
        facts["one expert"] = f"{_size(expert)} in one layer"
        facts["all experts"] = f"{_size(experts)} in {len(config.moe_layers)} layers"
    facts["tokenizer"] = "yes" if checkpoint.tokenizer_path else "none (prompts as token ids)"
    facts["chat template"] = "yes" if checkpoint.chat_template() else "none"
    facts["fingerprint"] = checkpoint.fingerprint.hex()
    return facts


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:.2f} GiB"


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M"
