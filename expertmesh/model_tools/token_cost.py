"""What one generated token costs in memory traffic and arithmetic, at batch 1.

Operations count a multiplication and an addition as two: 2 for each weight that is multiplied, and
those of the attention scores and of the weighted values. Norms, rope and softmax are left out; they
are below a percent.
"""

from __future__ import annotations

from dataclasses import dataclass

from expertmesh.model_config import GqaConfig, MlaConfig, ModelConfig
from expertmesh.model_tools.kv_size import kv_of_context, seen
from expertmesh.model_tools.model_size import ModelSize


@dataclass(frozen=True)
class Work:
    """What a part does for a token."""

    nbytes: int
    """Read from memory: weights, and keys and values."""
    operations: int


@dataclass(frozen=True)
class TokenCost:
    """Work for one token, by who does it."""

    attention: Work
    """Of the attention worker: all but the routed experts."""
    experts: Work
    """Of the chosen experts, all expert workers together."""

    @property
    def total(self) -> Work:
        """Both."""
        return Work(
            self.attention.nbytes + self.experts.nbytes,
            self.attention.operations + self.experts.operations,
        )


def token_cost(config: ModelConfig, size: ModelSize, *, context: int, itemsize: int) -> TokenCost:
    """The cost of the token that ends a context.

    Args:
        config: The model.
        size: Its weights.
        context: Tokens of the request, this one included.
        itemsize: Bytes of an element of the served dtype.
    """
    read = size.attention_worker.nbytes(itemsize) - _rest_of_embedding(config, itemsize)
    multiplied = size.attention_worker.count
    if not config.tie_word_embeddings:
        multiplied -= size.embedding.count  # one row is copied, nothing is multiplied
    return TokenCost(
        attention=Work(
            read + kv_of_context(config, context, itemsize).total,
            2 * multiplied + _score_operations(config, context),
        ),
        experts=Work(size.chosen_experts.nbytes(itemsize), 2 * size.chosen_experts.count),
    )


def _rest_of_embedding(config: ModelConfig, itemsize: int) -> int:
    """Bytes of the table that a lookup leaves alone; a tied one is read whole for the logits."""
    rows = 0 if config.tie_word_embeddings else config.vocab_size - 1
    return rows * config.hidden_size * itemsize


def _score_operations(config: ModelConfig, context: int) -> int:
    """Scores, and values weighted by them, of all heads of all layers."""
    total = 0
    for layer in config.layers:
        attention = layer.attention
        match attention:
            case GqaConfig():
                products = attention.head_dim + attention.value_dim
            case MlaConfig():  # heads attend to the latent itself, and sum latents
                products = 2 * attention.kv_lora_rank + attention.rope_head_dim
        total += 2 * attention.num_heads * products * seen(attention.sliding_window, context)
    return total
