"""What the scheduler must keep to: room of the attention worker, and choices of the operator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Self

from expertmesh.errors import ContextLengthError, RequestError
from expertmesh.kv_groups import KvGroups
from expertmesh.settings import EngineSettings


@dataclass(frozen=True)
class SchedulerLimits:
    """What the attention worker has room for."""

    num_kv_blocks: int
    kv_block_size: int
    """Tokens of one KV block."""
    num_request_slots: int
    max_step_tokens: int
    model_len: int
    """Longest sequence that the model takes, prompt and output together."""

    sliding_windows: tuple[int | None, ...] = (None,)
    """Per KV group: how many tokens a token sees; None for all."""

    @cached_property
    def kv_groups(self) -> KvGroups:
        """How sequences are kept in the KV cache."""
        return KvGroups.of(self.kv_block_size, self.sliding_windows)

    @cached_property
    def kv_cache_tokens(self) -> int:
        """Tokens that the KV cache holds in all groups. More, if sequences exceed windows."""
        return self.kv_groups.capacity(self.num_kv_blocks)

    @cached_property
    def max_model_len(self) -> int:
        """Longest sequence that can be served: of the model, and alone in the KV cache."""
        return self.kv_groups.longest_sequence(
            self.num_kv_blocks, self.model_len, self.max_step_tokens
        )

    def check_fits(self, num_prompt_tokens: int) -> None:
        """Raises RequestError for a prompt that can never be served."""
        if num_prompt_tokens < 1:
            raise RequestError("the prompt is empty, expected at least one token", param="prompt")
        if num_prompt_tokens >= self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens and one more is to be generated, but "
                f"prompt and output together can have {self.max_model_len}",
                param="prompt",
            )


@dataclass(frozen=True)
class SchedulerPolicy:
    """Choices of the operator."""

    prefix_caching: bool = True
    long_prefill_tokens: int | None = None
    """Most prompt tokens of one request in a step while others have work; None is half of it."""
    priority_step_s: float = 10.0
    """Seconds of arrival that one level of priority counts for."""

    @classmethod
    def of(cls, settings: EngineSettings) -> Self:
        """The choices in the settings."""
        return cls(settings.prefix_caching, settings.long_prefill_tokens, settings.priority_step_s)

    def long_prefill(self, max_step_tokens: int) -> int:
        """Most prompt tokens of one request in a step while others have work."""
        return self.long_prefill_tokens or max(1, max_step_tokens // 2)
