"""A model that nobody computes, for tests of who holds what."""

from __future__ import annotations

from expertmesh.model_config import (
    DenseFfnConfig,
    GateConfig,
    GqaConfig,
    LayerConfig,
    ModelConfig,
    MoeFfnConfig,
    RopeConfig,
)


def model(*, moe: bool = True, num_experts: int = 4) -> ModelConfig:
    """Layer 0 is dense, layers 1 and 2 have experts."""
    rope = RopeConfig(theta=1e4, dim=8)
    attention = GqaConfig(num_heads=1, num_kv_heads=1, head_dim=8, rope=rope, scale=1.0)
    dense = LayerConfig(attention, DenseFfnConfig(8))
    experts = LayerConfig(attention, MoeFfnConfig(GateConfig(num_experts=num_experts, top_k=2), 8))
    layers = (dense, experts, experts) if moe else (dense,)
    return ModelConfig("mixtral", 32, 8, layers, 1e-5, 64, False, "float32")
