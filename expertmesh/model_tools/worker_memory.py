"""How much memory the weights take in each process: pure arithmetic over their numbers."""

from __future__ import annotations

from dataclasses import dataclass

from expertmesh.model_config import ModelConfig
from expertmesh.model_tools.model_size import NONE, LayerSize, ModelSize, Weights
from expertmesh.placement import expert_share


@dataclass(frozen=True)
class ExpertShare:
    """What the smallest and the largest of some expert workers hold."""

    num_workers: int
    fewest_experts: int
    """Of a layer."""
    most_experts: int
    min_nbytes: int
    max_nbytes: int


def attention_worker_nbytes(config: ModelConfig, size: ModelSize, itemsize: int) -> int:
    """Bytes of everything but the routed experts.

    An embedding that is also the output projection is held in both forms.
    """
    second = size.embedding if config.tie_word_embeddings else NONE
    return (size.attention_worker + second).nbytes(itemsize)


def expert_nbytes(size: ModelSize, itemsize: int) -> int:
    """Bytes of one routed expert, the largest if layers differ; 0 without any."""
    return max((layer.expert.nbytes(itemsize) for layer in size.layers), default=0)


def expert_worker_nbytes(
    config: ModelConfig, size: ModelSize, num_workers: int, itemsize: int
) -> ExpertShare:
    """What each of `num_workers` expert workers holds if they share all layers' experts evenly."""
    shares = [expert_share(i, num_workers, config.num_experts) for i in range(num_workers)]
    nbytes = [_of_share(size, share).nbytes(itemsize) for share in shares]
    counts = [len(share) for share in shares]
    return ExpertShare(num_workers, min(counts), max(counts), min(nbytes), max(nbytes))


def _of_share(size: ModelSize, share: range) -> Weights:
    return sum((layer.expert * _held(layer, share) for layer in size.layers), NONE)


def _held(layer: LayerSize, share: range) -> int:
    return len(range(share.start, min(share.stop, layer.num_experts)))
