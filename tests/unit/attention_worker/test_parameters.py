"""Tensors of a checkpoint: each is taken once, in the type it is asked for."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attention_worker.loader import load_model
from attention_worker.parameters import Parameters
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import CheckpointError
from expertmesh.families import FAMILIES
from expertmesh.model_tools.make_tiny import write_tiny
from expertmesh.model_tools.quantize import QUANTIZATIONS, quantize_model
from tests.conftest import Models
from tests.support.parameters import parameters_of
from tests.support.tiny_checkpoints import LLAMA, MIXTRAL

CPU = torch.device("cpu")


@pytest.fixture
def parameters(models: Models) -> Parameters:
    """Those of a tiny Mixtral, for bfloat16."""
    return Parameters(Checkpoint.open(models.tiny(MIXTRAL)), torch.bfloat16, CPU)


def test_a_tensor_can_be_taken_once(parameters: Parameters) -> None:
    """The second time it is missing, and the error names it."""
    parameters.take("layers.0.o")
    with pytest.raises(CheckpointError, match=r"parameter layers\.0\.o is missing"):
        parameters.take("layers.0.o")


def test_tensors_come_in_the_type_that_is_asked_for(parameters: Parameters) -> None:
    """The type of computation, unless another is named."""
    assert parameters.take("layers.0.o").dtype == torch.bfloat16
    assert parameters.take("layers.0.input_norm", torch.float32).dtype == torch.float32
    assert parameters.linear("layers.0.gate", dtype=torch.float32).weight_KN.dtype == torch.float32


def test_what_is_left_over_is_named(parameters: Parameters) -> None:
    """All of it, sorted."""
    for index in range(3):
        for name in ("qkv", "o", "input_norm", "ffn_norm"):
            parameters.take(f"layers.{index}.{name}")
    for name in ("embed", "norm", "lm_head", "layers.1.gate"):
        parameters.take(name)
    with pytest.raises(CheckpointError, match=r"without a use: layers\.0\.gate, layers\.2\.gate"):
        parameters.check_all_taken()


def test_norms_and_gates_are_float32_in_any_type(models: Models) -> None:
    """Whatever the type of computation."""
    model = load_model(Checkpoint.open(models.tiny(MIXTRAL)), torch.bfloat16, CPU, 64)
    layer = model.layers[0]
    assert model.embed_VH.dtype == torch.bfloat16
    for norm in (layer.input_norm, layer.ffn_norm, model.norm):
        assert vars(norm)["weight_H"].dtype == torch.float32
    assert vars(layer.ffn)["gate"].linear.weight_KN.dtype == torch.float32


def test_a_tied_output_projection_is_not_scaled_with_the_embedding(models: Models) -> None:
    """The embedding is scaled in place; the projection was packed before."""
    checkpoint = Checkpoint.open(models.tiny(replace(LLAMA, tied=True)))
    plain = load_model(checkpoint, torch.float32, CPU, 64)
    checkpoint.config = replace(checkpoint.config, embedding_scale=3.0)
    scaled = load_model(checkpoint, torch.float32, CPU, 64)
    assert torch.equal(scaled.embed_VH, 3 * plain.embed_VH)
    assert torch.equal(scaled.lm_head.weight_KN, plain.lm_head.weight_KN)


def test_quantised_weights_are_decoded_one_at_a_time(tmp_path: Path) -> None:
    """A model in FP32 never is in memory beside the one that is served, which is half as large."""
    family = FAMILIES["deepseek_v3"]
    sizes = {"num_hidden_layers": 8, "first_k_dense_replace": 8, "intermediate_size": 512}
    write_tiny(replace(family, tiny={**family.tiny, **sizes}), tmp_path / "plain", 0, "float32")
    quantize_model(tmp_path / "plain", tmp_path / "fp8", QUANTIZATIONS["fp8"])
    checkpoint = Checkpoint.open(tmp_path / "fp8")
    sizes_in_fp32 = [4 * tensor.data.size for tensor in parameters_of(checkpoint).values()]
    largest = max(sizes_in_fp32)
    assert 10 * largest < sum(sizes_in_fp32)
    tracemalloc.start()  # knows of numpy's memory, not of tensors
    load_model(checkpoint, torch.bfloat16, CPU, 64)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * largest
