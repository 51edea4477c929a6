"""The forward pass of a dense Llama model in numpy: slow, short, one layer in memory at a time.

Used to measure hidden states. Rope scaling is left out: the sample is far shorter than where it
matters.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from expertmesh.host_tensor import Array, Float32, to_float32
from expertmesh.model_config import GqaConfig
from expertmesh.model_tools.dense_source import DenseSource


def ffn_inputs(source: DenseSource, ids_T: Array) -> Iterator[tuple[int, Float32]]:
    """Yields (layer, [T, H]): what each layer's FFN is given for one sequence of token ids."""
    config = source.config

    def weight(name: str) -> Float32:
        return to_float32(source.tensor(name), config.dtype)

    x_TH = to_float32(source.tensor("model.embed_tokens.weight")[ids_T], config.dtype)
    for layer, layer_config in enumerate(config.layers):
        prefix = f"model.layers.{layer}."
        norm_H = weight(prefix + "input_layernorm.weight")
        h_TH = rms_norm(x_TH, norm_H, config.norm.eps)
        q, k, v, o = (weight(f"{prefix}self_attn.{name}_proj.weight") for name in "qkvo")
        x_TH += attention(h_TH @ q.T, h_TH @ k.T, h_TH @ v.T, layer_config.gqa) @ o.T
        norm_H = weight(prefix + "post_attention_layernorm.weight")
        h_TH = rms_norm(x_TH, norm_H, config.norm.eps)
        yield layer, h_TH
        gate, up, down = (
            weight(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up", "down")
        )
        x_TH += (silu(h_TH @ gate.T) * (h_TH @ up.T)) @ down.T


def rms_norm(x_TH: Float32, weight_H: Float32, eps: float) -> Float32:
    """Root-mean-square norm."""
    mean_T1 = np.square(x_TH).mean(-1, keepdims=True)
    return np.asarray(x_TH / np.sqrt(mean_T1 + eps) * weight_H, np.float32)


def silu(x: Float32) -> Float32:
    """x * sigmoid(x)."""
    return np.asarray(x / (1 + np.exp(-np.clip(x, -80, 80))), np.float32)


def attention(q_TQ: Float32, k_TK: Float32, v_TK: Float32, config: GqaConfig) -> Float32:
    """Causal attention of one sequence, [T, heads * head_dim]."""
    length = len(q_TQ)
    q_nTD = rotate(split_heads(q_TQ, config.num_heads), config.rope.theta)
    k_nTD = rotate(split_heads(k_TK, config.num_kv_heads), config.rope.theta)
    repeats = config.num_heads // config.num_kv_heads
    k_nTD = np.repeat(k_nTD, repeats, 0)
    v_nTD = np.repeat(split_heads(v_TK, config.num_kv_heads), repeats, 0)
    scores_nTT = q_nTD @ k_nTD.swapaxes(1, 2) * np.float32(config.scale)
    scores_nTT[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
    scores_nTT = np.exp(scores_nTT - scores_nTT.max(-1, keepdims=True))
    scores_nTT /= scores_nTT.sum(-1, keepdims=True)
    return np.asarray((scores_nTT @ v_nTD).swapaxes(0, 1).reshape(length, -1), np.float32)


def split_heads(x_TN: Float32, num_heads: int) -> Float32:
    """[T, heads * D] to [heads, T, D]."""
    return x_TN.reshape(len(x_TN), num_heads, -1).swapaxes(0, 1)


def rotate(x_nTD: Float32, theta: float) -> Float32:
    """Rope at positions 0..T-1; pairs are (i, i + D/2)."""
    _, length, dim = x_nTD.shape
    frequency = theta ** (-np.arange(0, dim, 2) / dim)
    angle = np.outer(np.arange(length), frequency)
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = np.split(x_nTD, 2, axis=-1)
    rotated = np.concatenate((first * cos - second * sin, second * cos + first * sin), -1)
    return rotated.astype(np.float32)
