"""`ModelFacts` as JSON. Keys are documented in docs/models.md and stay as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict

from expertmesh.families.config_reader import Json
from expertmesh.model_config import (
    AttentionConfig,
    MlaConfig,
    ModelConfig,
    MoeFfnConfig,
)
from expertmesh.model_tools.model_facts import ModelFacts
from expertmesh.model_tools.model_words import (
    FfnConfig,
    attention_kinds,
    attention_pattern,
    ffn_kinds,
    ffn_pattern,
    gate_words,
)


def facts_json(facts: ModelFacts) -> Json:
    """All facts; bytes and operations are whole numbers."""
    config = facts.config
    return {
        "family": config.family,
        "dtype": config.dtype,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_ids": list(config.eos_token_ids),
        "parameters": _parameters(facts),
        "layers": _layers(config),
        "attention": [
            _attention(config, kind, label) for kind, label in attention_kinds(config).items()
        ],
        "ffn": [_ffn(config, kind, label) for kind, label in ffn_kinds(config).items()],
        "kv_cache": _kv_cache(facts),
        "memory": _memory(facts),
        "token": _token(facts),
    }


def _parameters(facts: ModelFacts) -> Json:
    size = facts.size
    return {
        "total": size.total,
        "active": size.active,
        "embedding": size.embedding.count,
        "output": size.head.count,
        "attention_worker": size.attention_worker.count,
        "experts": size.experts.count,
    }


def _layers(config: ModelConfig) -> Json:
    return {
        "count": config.num_layers,
        "moe": len(config.moe_layers),
        "attention": attention_pattern(config),
        "ffn": ffn_pattern(config),
    }


def _attention(config: ModelConfig, kind: AttentionConfig, label: str) -> Json:
    return {
        "label": label,
        "kind": "latent" if isinstance(kind, MlaConfig) else "grouped-query",
        "layers": sum(layer.attention == kind for layer in config.layers),
        "kv_elements_per_token": kind.kv.width,
        **_fields(asdict(kind)),
    }


def _ffn(config: ModelConfig, ffn: FfnConfig, label: str) -> Json:
    found: Json = {
        "label": label,
        "kind": "moe" if isinstance(ffn, MoeFfnConfig) else "dense",
        "layers": sum(layer.ffn == ffn for layer in config.layers),
        **_fields(asdict(ffn)),
    }
    if isinstance(ffn, MoeFfnConfig):
        found["gate_equation"] = gate_words(ffn.gate)
    return found


def _kv_cache(facts: ModelFacts) -> Json:
    return {
        "full_bytes_per_token": facts.kv_per_token.full,
        "window_bytes_per_token": facts.kv_per_token.window,
        "context": facts.context,
        "bytes_of_context": facts.kv_of_context.total,
    }


def _memory(facts: ModelFacts) -> Json:
    return {
        "attention_worker_bytes": facts.attention_worker_nbytes,
        "expert_bytes": facts.expert_nbytes,
        "expert_workers": [
            {
                "workers": share.num_workers,
                "min_experts_per_layer": share.fewest_experts,
                "max_experts_per_layer": share.most_experts,
                "min_bytes": share.min_nbytes,
                "max_bytes": share.max_nbytes,
            }
            for share in facts.expert_workers
        ],
    }


def _token(facts: ModelFacts) -> Json:
    parts = {"attention": facts.token.attention, "experts": facts.token.experts}
    work = {name: {"bytes": w.nbytes, "operations": w.operations} for name, w in parts.items()}
    network = [
        {
            "workers": sent.num_workers,
            "rows_out": round(sent.rows_out, 6),
            "rows_back": sent.rows_back,
            "bytes_out": round(sent.nbytes_out),
            "bytes_back": sent.nbytes_back,
        }
        for sent in facts.traffic
    ]
    return {"context": facts.context, **work, "network": network}


def _fields(fields: Mapping[str, object]) -> Json:
    """Fields of a dataclass; infinity, which JSON does not have, becomes null."""
    return {name: _value(value) for name, value in fields.items()}


def _value(value: object) -> object:
    if isinstance(value, dict):
        return _fields(value)
    return None if value == math.inf else value
