"""Tiny random checkpoints made by transformers: the same families as real models, no download.

Weights are drawn wide, so that logits are peaked: greedy choices then have margins far above
rounding, and a wrong expert, row or position changes tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_TEXT = (
    "The quick brown fox jumps over the lazy dog.",
    "What is the capital of France? The capital of France is Paris.",
    "Experts answer; the gate chooses. Größe, naïve café, 日本語, 🙂.",
    "user assistant system 0 1 2 3 4 5 6 7 8 9",
)


@dataclass(frozen=True)
class TinyShape:
    """Sizes of a tiny model. `num_experts` 0 is a dense Llama."""

    num_layers: int = 3
    hidden_size: int = 48
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 80
    num_experts: int = 8
    top_k: int = 2
    vocab_size: int = 128
    max_positions: int = 512
    tied: bool = False
    attention_bias: bool = False
    rope: Literal["default", "linear", "llama3"] = "default"
    dtype: Literal["float32", "bfloat16"] = "float32"
    eos_token_id: int = 2
    seed: int = 0


LLAMA = TinyShape(num_layers=2, num_experts=0, head_dim=8, rope="llama3", seed=1)
LLAMA_TIED = TinyShape(
    num_experts=0, hidden_size=32, num_heads=4, num_kv_heads=4, head_dim=8, tied=True, seed=9
)
MIXTRAL = TinyShape(seed=3)
MIXTRAL_FOUR = TinyShape(
    num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=1, num_experts=4, seed=10
)
MIXTRAL_WIDE = TinyShape(
    num_layers=2,
    hidden_size=576,
    num_heads=8,
    intermediate_size=640,
    seed=12,
)
"""Wide enough for exactness to mean something: MKL sums up to 384 products in order, as our kernels
do, and splits longer sums in ways that depend on the batch."""
MIXTRAL_TEXT = TinyShape(vocab_size=320, seed=5)


def save_tiny(folder: Path, shape: TinyShape, *, tokenizer: bool = False) -> Path:
    """Writes a checkpoint of this shape into `folder`, and returns the folder."""
    torch.manual_seed(shape.seed)
    model = _mixtral(shape) if shape.num_experts else _llama(shape)
    model.to(getattr(torch, shape.dtype)).save_pretrained(folder)
    if tokenizer:
        save_tokenizer(folder, shape.vocab_size)
    return folder


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE tokenizer with a chat template; every byte has a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    assert tokenizer.get_vocab_size() <= vocab_size
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _common(shape: TinyShape) -> dict[str, object]:
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": shape.tied,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": shape.eos_token_id,
    }


def _mixtral(shape: TinyShape) -> MixtralForCausalLM:
    config = MixtralConfig(
        **_common(shape),
        num_local_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        sliding_window=None,
        rope_theta=10_000.0,
    )
    return MixtralForCausalLM(config).eval()


def _llama(shape: TinyShape) -> LlamaForCausalLM:
    scaling: dict[str, object] = {"rope_type": shape.rope, "rope_theta": 10_000.0}
    if shape.rope == "linear":
        scaling["factor"] = 2.0
    if shape.rope == "llama3":
        scaling |= {
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": shape.max_positions // 4,
        }
    config = LlamaConfig(
        **_common(shape), attention_bias=shape.attention_bias, rope_parameters=scaling
    )
    return LlamaForCausalLM(config).eval()
