"""Kimi-K2: a DeepSeek-V3 with other sizes, one group of experts and a `model_type` of its own."""

from __future__ import annotations

from dataclasses import replace

from expertmesh.families.deepseek_v3 import DEEPSEEK_V3, TINY

KIMI_K2 = replace(
    DEEPSEEK_V3,
    model_type="kimi_k2",
    tiny={
        **TINY,
        "rms_norm_eps": 1e-5,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
    },
)
