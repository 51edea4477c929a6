"""Released models: `config.json` with every key, and the sizes that their cards and papers tell."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.support.hub_configs import DENSE, Config
from tests.support.hub_latent_configs import LATENT
from tests.support.hub_moe_configs import MOE

CONFIGS: dict[str, Config] = DENSE | MOE | LATENT
"""By name."""


@dataclass(frozen=True)
class PublishedModel:
    """A model and what is known of its size."""

    name: str
    """In `CONFIGS`."""
    total_b: float
    """Parameters in billions: with embeddings, without modules for speculation."""
    active_b: float | None = None
    """Of these, per token; None if that was not published, or is that of a model above."""
    active_has_embedding: bool = field(default=True, kw_only=True)
    """Whether the published number counts the input embedding."""

    @property
    def config(self) -> Config:
        """What `config.json` holds."""
        return CONFIGS[self.name]


PUBLISHED = (
    PublishedModel("Llama-3.1-8B-Instruct", 8.03, 8.03),
    PublishedModel("Llama-3.2-1B-Instruct", 1.24, 1.24),
    PublishedModel("SmolLM2-135M-Instruct", 0.1345, 0.1345),
    PublishedModel("Mistral-7B-v0.1", 7.24, 7.24),
    PublishedModel("Mistral-7B-Instruct-v0.3", 7.25, 7.25),
    PublishedModel("Mistral-Nemo-Instruct-2407", 12.2, 12.2),
    PublishedModel("Qwen2.5-7B-Instruct", 7.62, 7.62),
    PublishedModel("Qwen2.5-72B-Instruct with YaRN", 72.7, 72.7),
    PublishedModel("Qwen3-0.6B", 0.6, 0.6),
    PublishedModel("Qwen3-32B", 32.8, 32.8),
    PublishedModel("gemma-2-2b-it", 2.61, 2.61),
    PublishedModel("gemma-2-9b", 9.24, 9.24),
    PublishedModel("gemma-2-27b-it", 27.2, 27.2),
    PublishedModel("gemma-3-270m-it", 0.268, 0.268),
    PublishedModel("gemma-3-1b-it", 1.0, 1.0),
    PublishedModel("Mixtral-8x7B-Instruct-v0.1", 46.7, 12.9),
    PublishedModel("Mixtral-8x22B-Instruct-v0.1", 140.6, 39.1),
    PublishedModel("Qwen1.5-MoE-A2.7B", 14.3, 2.7),
    PublishedModel("Qwen2-57B-A14B-Instruct", 57.4, 14.2),
    PublishedModel("Qwen3-30B-A3B", 30.5, 3.3),
    PublishedModel("Qwen3-30B-A3B-FP8", 30.5),
    PublishedModel("Qwen3-235B-A22B", 235, 22),
    PublishedModel("OLMoE-1B-7B-0924", 6.92, 1.3),
    PublishedModel("DeepSeek-V2-Lite", 15.7, 2.4, active_has_embedding=False),
    PublishedModel("DeepSeek-Coder-V2-Lite-Instruct", 15.7),
    PublishedModel("DeepSeek-V2", 236, 21),
    PublishedModel("DeepSeek-V2.5", 236),
    PublishedModel("DeepSeek-V3", 671, 37, active_has_embedding=False),
    PublishedModel("DeepSeek-V3.1", 671),
    PublishedModel("Moonlight-16B-A3B-Instruct", 16.0),
    PublishedModel("Kimi-K2-Instruct", 1026, 32, active_has_embedding=False),
    PublishedModel("Kimi-K2-Thinking", 1026),
    PublishedModel("gpt-oss-20b", 20.91, 3.61, active_has_embedding=False),
    PublishedModel("gpt-oss-120b", 116.83, 5.13, active_has_embedding=False),
    PublishedModel("MiMo-V2-Flash", 309, 15),
)
