"""The memory that `model inspect` tells is what the processes take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from attention_worker.loader import load_model
from expert_worker.store import ExpertStore
from expertmesh.checkpoint import Checkpoint
from expertmesh.families import FAMILIES
from expertmesh.model_tools.make_tiny import write_tiny
from expertmesh.model_tools.model_facts import model_facts
from expertmesh_kernels.rope import RopeTable

WIDE: Mapping[str, object] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""Multiples of the 64 columns that packed weights have."""
LATENT: Mapping[str, object] = {
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 64,
}
MIXED: Mapping[str, object] = {
    "num_attention_heads": 8,
    "v_head_dim": 64,
    "n_routed_experts": 64,
    "partial_rotary_factor": 0.5,
}


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("gemma3_text", {}),
        ("gpt_oss", {"num_local_experts": 64}),
        ("deepseek_v3", LATENT),
        ("mimo_v2_flash", MIXED),
    ],
)
def test_memory_is_as_told(tmp_path: Path, model_type: str, sizes: Mapping[str, object]) -> None:
    """To the byte, where no column is padding: attention worker, and an expert."""
    family = FAMILIES[model_type]
    config = write_tiny(
        replace(family, tiny={**family.tiny, **WIDE, **sizes}), tmp_path / "model", 0, "bfloat16"
    )
    facts = model_facts(config, 1)
    checkpoint = Checkpoint.open(tmp_path / "model")
    model = load_model(checkpoint, torch.bfloat16, torch.device("cpu"), 64)
    assert sum(nbytes for _, nbytes in set(memory(model))) == facts.attention_worker_nbytes
    if config.moe_layers:
        store = ExpertStore(checkpoint, "bfloat16")
        store.load(config.moe_layers[-1], 3)
        assert store.resident_bytes == facts.expert_nbytes
    checkpoint.close()


def memory(value: object) -> Iterator[tuple[int, int]]:
    """Address and bytes of every tensor of an object but tables of positions."""
    match value:
        case torch.Tensor():
            storage = value.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()
        case np.ndarray():
            yield value.ctypes.data, value.nbytes
        case tuple():
            for item in value:
                yield from memory(item)
        case _ if is_dataclass(value) and not isinstance(value, RopeTable):
            for field in fields(value):
                yield from memory(getattr(value, field.name))
