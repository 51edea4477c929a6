"""Everything that `model inspect` tells about a model's description, computed once."""

from __future__ import annotations

from dataclasses import dataclass

from expertmesh.model_config import ModelConfig
from expertmesh.model_tools.expert_traffic import Traffic, traffic
from expertmesh.model_tools.kv_size import KvBytes, kv_of_context, kv_per_token
from expertmesh.model_tools.model_size import ModelSize, model_size
from expertmesh.model_tools.token_cost import TokenCost, token_cost
from expertmesh.model_tools.worker_memory import (
    ExpertShare,
    attention_worker_nbytes,
    expert_nbytes,
    expert_worker_nbytes,
)
from expertmesh.safetensors_file import STORAGE

DEFAULT_CONTEXT = 4096
NUM_EXPERT_WORKERS = (1, 2, 4, 8)
"""For which memory and traffic are told."""


@dataclass(frozen=True)
class ModelFacts:
    """Sizes and costs, in the dtype of the checkpoint, which is what is served by default."""

    config: ModelConfig
    size: ModelSize
    context: int
    """Tokens of the request for which costs are told."""
    kv_per_token: KvBytes
    kv_of_context: KvBytes
    attention_worker_nbytes: int
    expert_nbytes: int
    """Of one routed expert; 0 for a dense model."""
    expert_workers: tuple[ExpertShare, ...]
    """For each of `NUM_EXPERT_WORKERS`; none for a dense model."""
    token: TokenCost
    traffic: tuple[Traffic, ...]
    """For each of `NUM_EXPERT_WORKERS`; none for a dense model."""


def model_facts(config: ModelConfig, context: int) -> ModelFacts:
    """Computes all of it.

    Args:
        config: The model.
        context: Tokens of the request for which costs are told, at least 1.
    """
    size, itemsize = model_size(config), STORAGE[config.dtype].itemsize
    worker_counts = NUM_EXPERT_WORKERS if config.moe_layers else ()
    return ModelFacts(
        config=config,
        size=size,
        context=context,
        kv_per_token=kv_per_token(config, itemsize),
        kv_of_context=kv_of_context(config, context, itemsize),
        attention_worker_nbytes=attention_worker_nbytes(config, size, itemsize),
        expert_nbytes=expert_nbytes(size, itemsize),
        expert_workers=tuple(
            expert_worker_nbytes(config, size, count, itemsize) for count in worker_counts
        ),
        token=token_cost(config, size, context=context, itemsize=itemsize),
        traffic=tuple(traffic(config, count, itemsize) for count in worker_counts),
    )
