"""Tiny model folders written with numpy: names and shapes as on the hub, random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Array = npt.NDArray[np.generic]
Tensors = dict[str, Array]

V, H, FFN, E, HEADS, KV_HEADS, LAYERS = 40, 16, 24, 4, 4, 2, 2
K = H // HEADS * KV_HEADS

LLAMA_CONFIG: dict[str, object] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float32",
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "rope_theta": 5000.0,
    "eos_token_id": 2,
}

MIXTRAL_CONFIG: dict[str, object] = {
    **LLAMA_CONFIG,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": E,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}


def llama_tensors(seed: int = 0) -> Tensors:
    """All tensors of the Llama model, FP32."""
    draw = _Draw(seed)
    tensors = _common(draw)
    for layer in range(LAYERS):
        mlp = f"model.layers.{layer}.mlp."
        tensors[mlp + "gate_proj.weight"] = draw(FFN, H)
        tensors[mlp + "up_proj.weight"] = draw(FFN, H)
        tensors[mlp + "down_proj.weight"] = draw(H, FFN)
    return tensors


def mixtral_tensors(seed: int = 0) -> Tensors:
    """All tensors of the Mixtral model, one per expert, FP32."""
    draw = _Draw(seed)
    tensors = _common(draw)
    for layer in range(LAYERS):
        moe = f"model.layers.{layer}.block_sparse_moe."
        tensors[moe + "gate.weight"] = draw(E, H)
        for expert in range(E):
            tensors[f"{moe}experts.{expert}.w1.weight"] = draw(FFN, H)
            tensors[f"{moe}experts.{expert}.w2.weight"] = draw(H, FFN)
            tensors[f"{moe}experts.{expert}.w3.weight"] = draw(FFN, H)
    return tensors


def fused(tensors: Tensors, prefix: str = "mlp.") -> Tensors:
    """The same Mixtral with stacked expert tensors, [E, 2I, H] and [E, H, FFN]."""
    kept = {name: data for name, data in tensors.items() if ".experts." not in name}
    for layer in range(LAYERS):
        old = f"model.layers.{layer}.block_sparse_moe."
        new = f"model.layers.{layer}.{prefix}"
        experts = f"{old}experts."
        kept[new + "gate.weight"] = kept.pop(old + "gate.weight")
        kept[new + "experts.gate_up_proj"] = np.stack(
            [
                np.concatenate(
                    (tensors[f"{experts}{e}.w1.weight"], tensors[f"{experts}{e}.w3.weight"])
                )
                for e in range(E)
            ]
        )
        kept[new + "experts.down_proj"] = np.stack(
            [tensors[f"{experts}{e}.w2.weight"] for e in range(E)]
        )
    return kept


def save_folder(folder: Path, config: Mapping[str, object], tensors: Tensors) -> Path:
    """Writes one safetensors file and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def save_sharded(folder: Path, config: Mapping[str, object], tensors: Tensors) -> Path:
    """Writes two safetensors files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for part in (0, 1):
        name = f"model-{part + 1:05}-of-00002.safetensors"
        chosen = {key: tensors[key] for key in sorted(tensors)[part::2]}
        save_file(chosen, folder / name)
        weight_map |= dict.fromkeys(chosen, name)
    save_index(folder, weight_map)
    return folder


def save_index(folder: Path, weight_map: Mapping[str, object]) -> None:
    """Writes the index of a sharded folder."""
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


class _Draw:
    """Random FP32 tensors, one after the other."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def __call__(self, *shape: int) -> npt.NDArray[np.float32]:
        return (self._random.standard_normal(shape) * 0.2).astype(np.float32)


def _common(draw: _Draw) -> Tensors:
    tensors: Tensors = {
        "model.embed_tokens.weight": draw(V, H),
        "model.norm.weight": draw(H),
        "lm_head.weight": draw(V, H),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = draw(H)
        tensors[prefix + "post_attention_layernorm.weight"] = draw(H)
        tensors[prefix + "self_attn.q_proj.weight"] = draw(H, H)
        tensors[prefix + "self_attn.k_proj.weight"] = draw(K, H)
        tensors[prefix + "self_attn.v_proj.weight"] = draw(K, H)
        tensors[prefix + "self_attn.o_proj.weight"] = draw(H, H)
    return tensors
