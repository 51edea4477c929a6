"""How a token is chosen, written down once more: one row, plain Python and NumPy, slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from expertmesh.v1 import attention_service_pb2 as pb
from expertmesh_kernels.sampling import sample_reference


def edited_reference(
    logits_V: npt.NDArray[np.float32],
    prompt: Sequence[int],
    output: Sequence[int],
    spec: pb.SamplingSpec,
) -> npt.NDArray[np.float32]:
    """Logits to choose from, after every change but that of a grammar."""
    edited = logits_V.astype(np.float32).copy()
    for bias in spec.logit_bias:
        edited[bias.token_id] += np.float32(bias.bias)
    repetition = np.float32(spec.repetition_penalty or 1.0)
    for token in {*prompt, *output}:
        edited[token] = (
            edited[token] / repetition if edited[token] > 0 else edited[token] * repetition
        )
    for token, count in Counter(output).items():
        edited[token] -= np.float32(spec.frequency_penalty) * np.float32(count)
        edited[token] -= np.float32(spec.presence_penalty)
    for word in spec.bad_words:
        *before, last = word.ids
        if list(output[len(output) - len(before) :]) == before:
            edited[last] = -np.inf
    if spec.allowed_token_ids:
        banned = np.ones(len(edited), np.bool_)
        banned[list(spec.allowed_token_ids)] = False
        edited[banned] = -np.inf
    if len(output) < spec.min_tokens:
        edited[list(spec.stop_token_ids)] = -np.inf
    return edited


def token_reference(
    logits_V: npt.NDArray[np.float32],
    prompt: Sequence[int],
    output: Sequence[int],
    spec: pb.SamplingSpec,
) -> int:
    """The token that comes after prompt and output."""
    edited = edited_reference(logits_V, prompt, output, spec)
    tokens = sample_reference(
        torch.from_numpy(edited[None]),
        np.array([spec.temperature], np.float32),
        np.array([spec.min_p], np.float32),
        np.array([spec.top_p or 1.0], np.float32),
        np.array([spec.top_k], np.int32),
        np.array([spec.seed], np.uint64),
        np.array([len(prompt) + len(output)]),
    )
    return int(tokens[0])
