"""What the attention worker tells about tokens besides their ids, collected by position.

Steps bring pieces: chunks of a prompt, tokens of an output. After a preemption positions come
again, with the same content; the first one counts. Owner: the engine thread.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from expertmesh.v1 import attention_service_pb2 as pb
from gateway.sequence import SamplingParams, TokenLogprobs


class PromptLogprobsRecord(Protocol):
    """Log probabilities of a prompt's tokens."""

    def add(self, piece: pb.PromptLogprobs) -> None:
        """Takes what a step computed."""

    def whole(self) -> tuple[TokenLogprobs | None, ...] | None:
        """One per prompt token, None for the first one; None if they were not asked for."""


class RoutedExpertsRecord(Protocol):
    """Experts of a request's tokens."""

    def add(self, piece: pb.RoutedExperts) -> None:
        """Takes what a step computed."""

    def whole(self, num_tokens: int) -> npt.NDArray[np.uint16] | None:
        """[num_tokens, MoE layers, top-k] of the first tokens; None if they were not asked for."""


class NoPromptLogprobs:
    """They were not asked for."""

    def add(self, piece: pb.PromptLogprobs) -> None:
        """Ignored."""

    def whole(self) -> None:
        """Nothing."""


class NoRoutedExperts:
    """They were not asked for."""

    def add(self, piece: pb.RoutedExperts) -> None:
        """Ignored."""

    def whole(self, num_tokens: int) -> None:
        """Nothing."""


class PromptLogprobs:
    """Collects log probabilities of a prompt.

    Args:
        prompt_token_ids: The prompt.
    """

    def __init__(self, prompt_token_ids: tuple[int, ...]) -> None:
        self._prompt = prompt_token_ids
        self._found: dict[int, TokenLogprobs] = {}

    def add(self, piece: pb.PromptLogprobs) -> None:
        """Takes what a step computed; see PromptLogprobsRecord."""
        shape = (piece.num_tokens, piece.num_top)
        own = np.frombuffer(piece.logprobs, "<f4").tolist()
        ids = np.frombuffer(piece.top_ids, "<i4").reshape(shape).tolist()
        values = np.frombuffer(piece.top_logprobs, "<f4").reshape(shape).tolist()
        for index in range(piece.num_tokens):
            position = piece.start + index
            top = tuple(zip(ids[index], values[index], strict=True))
            record = TokenLogprobs(self._prompt[position], own[index], top)
            self._found.setdefault(position, record)

    def whole(self) -> tuple[TokenLogprobs | None, ...]:
        """One per prompt token."""
        return (None, *(self._found.get(position) for position in range(1, len(self._prompt))))


class RoutedExperts:
    """Collects the experts of a request's tokens."""

    def __init__(self) -> None:
        self._pieces: list[npt.NDArray[np.uint16]] = []
        self._num_tokens = 0

    def add(self, piece: pb.RoutedExperts) -> None:
        """Takes what a step computed; see RoutedExpertsRecord."""
        shape = (piece.num_tokens, piece.num_layers, piece.top_k)
        experts = np.frombuffer(piece.expert_ids, "<u2").reshape(shape)
        new = experts[max(0, self._num_tokens - piece.start) :]
        if len(new):
            self._pieces.append(new)
            self._num_tokens += len(new)

    def whole(self, num_tokens: int) -> npt.NDArray[np.uint16] | None:
        """The first `num_tokens` tokens; fewer if fewer were computed."""
        return np.concatenate(self._pieces)[:num_tokens] if self._pieces else None


def prompt_logprobs_record(
    params: SamplingParams, prompt_token_ids: tuple[int, ...]
) -> PromptLogprobsRecord:
    """What a request asked for."""
    if params.num_prompt_logprobs is None:
        return NoPromptLogprobs()
    return PromptLogprobs(prompt_token_ids)


def routed_experts_record(params: SamplingParams) -> RoutedExpertsRecord:
    """What a request asked for."""
    return RoutedExperts() if params.return_routed_experts else NoRoutedExperts()
