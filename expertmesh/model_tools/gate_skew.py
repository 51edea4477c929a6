"""Makes a gate prefer some experts, as gates of real models do.

A gate has no bias, so a preference has to come from the hidden states. Their mean m over many
tokens is far from zero: adding b * m / |m|^2 to a gate row adds about b to its logit. With

    b(rank) = -S * ln(rank) * s * sqrt(6) / pi

where s is the standard deviation of the logits of the random gate, the expert of that rank is
chosen first about proportionally to rank^-S (Zipf), since the maximum of logits with Gumbel noise
of scale s * sqrt(6) / pi follows exactly that law. The preference that the random gate has by
itself (its logits of m) is taken out first. Ranks are dealt anew in each layer. Mean and deviation
are measured by running the dense model on a sample of tokens, so the law holds roughly, not
exactly, on real text. With S = 0 the gate is left as it is drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from expertmesh.host_tensor import Float32
from expertmesh.model_tools.dense_source import DenseSource
from expertmesh.model_tools.numbers import permutation
from expertmesh.model_tools.numpy_llama import ffn_inputs
from expertmesh.model_tools.progress import Progress

MAX_SKEW = 8.0
_RANK_STREAM, _TOKEN_STREAM = 3, 4
_NUM_TOKENS = 128


@dataclass(frozen=True)
class GateBias:
    """Preference of each layer's gate; without samples it changes nothing."""

    skew: float = 0.0
    seed: int = 0
    samples: dict[int, Float32] = field(default_factory=dict)
    """Layer to hidden states [tokens, H] that reached its FFN."""

    def apply(self, layer: int, rows_GH: Float32) -> Float32:
        """The rows of a random gate with the preference added."""
        if layer not in self.samples:
            return rows_GH
        hidden_TH = self.samples[layer]
        mean_H = hidden_TH.mean(0)
        scale = float((hidden_TH @ rows_GH.T).std(0).mean()) * math.sqrt(6) / math.pi
        ranks_G = permutation(len(rows_GH), self.seed, _RANK_STREAM, layer) + 1
        bias_G = -self.skew * np.log(ranks_G) * scale
        bias_G -= bias_G.mean() + rows_GH @ mean_H
        direction_H = mean_H / np.square(mean_H).sum()
        return (rows_GH + np.outer(bias_G, direction_H)).astype(np.float32)


def measure_gate_bias(
    source: DenseSource, skew: float, progress: Progress, seed: int = 0
) -> GateBias:
    """Runs the dense model once on a sample of tokens; does nothing if skew is 0."""
    if skew == 0.0:
        return GateBias()
    config = source.config
    # Byte-pair vocabularies are ordered by frequency: low ids stand for common tokens.
    common = min(config.vocab_size, 4096)
    ids_T = permutation(common, seed, _TOKEN_STREAM)[:_NUM_TOKENS]
    progress.stage("measuring hidden states", config.num_layers)
    samples = {}
    for layer, hidden_TH in ffn_inputs(source, ids_T):
        samples[layer] = hidden_TH
        progress.advance(1)
    return GateBias(skew, seed, samples)
