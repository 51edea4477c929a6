"""A dense Llama model in a GGUF file, de-quantised to bfloat16 tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from expertmesh.errors import CheckpointError, SettingsError
from expertmesh.host_tensor import Array, Float32
from expertmesh.model_config import (
    DenseFfnConfig,
    GqaConfig,
    LayerConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
)
from expertmesh.model_tools.numbers import from_float32

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_MODEL_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


class GgufSource:
    """A GGUF file of the `llama` architecture.

    Args:
        path: The file. It is mapped by the `gguf` package, so it should be private to the caller.

    Raises:
        CheckpointError: the file is of another architecture.
        SettingsError: the `gguf` package is not installed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = _open(path)
        self._tensors: dict[str, ReaderTensor] = {t.name: t for t in self._reader.tensors}
        if self.field("general.architecture") != "llama":
            raise CheckpointError(f"{path}: expected the architecture 'llama'")
        self.config = self._parse_config()

    def field(self, key: str, default: object = None) -> object:
        """A metadata value, or the default."""
        found = self._reader.get_field(key)
        return default if found is None else found.contents()

    def integer(self, key: str) -> int:
        """A metadata value that has to be an integer."""
        value = self.field(key)
        if not isinstance(value, int):
            raise CheckpointError(f"{self._path}: {key}: expected an integer, found {value!r}")
        return value

    def number(self, key: str) -> float:
        """A metadata value that has to be a number; float32 is rounded to its shortest decimal."""
        value = self.field(key)
        if not isinstance(value, int | float):
            raise CheckpointError(f"{self._path}: {key}: expected a number, found {value!r}")
        return float(str(np.float32(value)))

    def tensor(self, name: str) -> Array:
        """A tensor by its Hugging Face name, as bfloat16 bits."""
        import gguf

        stored = self._tensors[gguf_name(name)]
        values: Float32 = gguf.quants.dequantize(stored.data, stored.tensor_type)
        values = values.reshape([int(size) for size in stored.shape[::-1]])
        attention = self.config.layers[0].gqa
        if "q_proj" in name:
            values = unpermute(values, attention.num_heads)
        elif "k_proj" in name:
            values = unpermute(values, attention.num_kv_heads)
        return from_float32(np.ascontiguousarray(values, np.float32), "bfloat16")

    def _parse_config(self) -> ModelConfig:
        hidden = self.integer("llama.embedding_length")
        num_heads = self.integer("llama.attention.head_count")
        head_dim = hidden // num_heads
        attention = GqaConfig(
            num_heads=num_heads,
            num_kv_heads=self.integer("llama.attention.head_count_kv"),
            head_dim=head_dim,
            rope=RopeConfig(self.number("llama.rope.freq_base"), head_dim),
            scale=head_dim**-0.5,
        )
        ffn = DenseFfnConfig(self.integer("llama.feed_forward_length"))
        return ModelConfig(
            family="llama",
            vocab_size=self.integer("llama.vocab_size"),
            hidden_size=hidden,
            layers=(LayerConfig(attention, ffn),) * self.integer("llama.block_count"),
            norm=NormConfig(self.number("llama.attention.layer_norm_rms_epsilon")),
            max_position_embeddings=self.integer("llama.context_length"),
            tie_word_embeddings="output.weight" not in self._tensors,
            dtype="bfloat16",
            bos_token_id=self.integer("tokenizer.ggml.bos_token_id"),
            eos_token_ids=(self.integer("tokenizer.ggml.eos_token_id"),),
        )


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` is `blk.3.ffn_up.weight` there."""
    stem = name.removesuffix(".weight")
    if stem in _MODEL_NAMES:
        return f"{_MODEL_NAMES[stem]}.weight"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[inner]}.weight"


def unpermute(rows: Float32, num_heads: int) -> Float32:
    """Undoes the row order of llama.cpp, [heads * D, H].

    It rotates neighbouring pairs (2i, 2i + 1) where Hugging Face rotates halves (i, i + D/2).
    """
    width = rows.shape[1]
    return rows.reshape(num_heads, -1, 2, width).swapaxes(1, 2).reshape(-1, width)


def _open(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise SettingsError(
            "the demo model needs the `gguf` package", fix="pip install 'expertmesh[gateway]'"
        ) from error
    try:
        return GGUFReader(path)
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise CheckpointError(f"{path}: not a complete GGUF file: {error}") from error
