"""Tensors of each family against those that transformers saves: names, shapes, and every value."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from expertmesh.checkpoint import Checkpoint, ExpertTensors
from expertmesh.errors import CheckpointError
from expertmesh.families import FAMILIES
from expertmesh.families.config_reader import Json
from expertmesh.model_tools.make_tiny import weight_rules
from expertmesh.safetensors_file import pread_into
from tests.support.hub_families import (
    MODEL_TYPES,
    hub_model,
    save_hub_model,
    tiny_json,
)
from tests.support.parameters import parameters_of

MOE = tuple(name for name in MODEL_TYPES if FAMILIES[name].expert_layouts)
SEVERAL_LAYOUTS = tuple(name for name in MOE if len(FAMILIES[name].expert_layouts) > 1)

VARIANTS: dict[str, tuple[str, Json]] = {
    **{name: (name, {}) for name in MODEL_TYPES},
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "qwen2_moe without biases": ("qwen2_moe", {"qkv_bias": False, "decoder_sparse_step": 2}),
    "qwen3_moe with biases": ("qwen3_moe", {"attention_bias": True}),
    "gemma2 untied with biases": ("gemma2", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma3_text with biases": ("gemma3_text", {"attention_bias": True}),
    "olmoe with biases": ("olmoe", {"attention_bias": True}),
    "deepseek_v2 with low-rank q": ("deepseek_v2", {"q_lora_rank": 12, "attention_bias": True}),
    "deepseek_v3 with full q": ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
    "deepseek_v3 dense": ("deepseek_v3", {"first_k_dense_replace": 3}),
    "gpt_oss without biases": ("gpt_oss", {"attention_bias": False}),
    "mimo_v2_flash with biases": ("mimo_v2_flash", {"attention_bias": True}),
}


@pytest.mark.parametrize(("model_type", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_weights_are_those_that_transformers_saves(
    model_type: str, changes: Json, tmp_path: Path
) -> None:
    """Names and shapes, in both layouts of the experts; and the files open strictly."""
    raw = tiny_json(model_type, **changes)
    for stacked in (False, True):
        folder = tmp_path / str(stacked)
        save_hub_model(folder, raw, stacked=stacked)
        config = Checkpoint.open(folder).config
        family = FAMILIES[model_type]
        layout = int(stacked and model_type in SEVERAL_LAYOUTS)
        saved = load_file(folder / "model.safetensors")
        rules = [source for _, source in weight_rules(family, config, layout=layout)]
        names = {name: tensor.shape for name, tensor in saved.items()}
        assert {_spelling(rule.names, names): rule.shape for rule in rules} == names
        if not stacked:
            assert [rule.names[0] for rule in rules if rule.names[0] not in names] == []


def _spelling(names: tuple[str, ...], saved: dict[str, tuple[int, ...]]) -> str:
    return next((name for name in names if name in saved), names[0])


@pytest.mark.parametrize("model_type", MOE)
@pytest.mark.parametrize("stacked", [False, True])
def test_experts_are_those_of_transformers(model_type: str, stacked: bool, tmp_path: Path) -> None:
    """Every expert of every layer, gate rows first, whatever its layout in the file."""
    state = save_hub_model(tmp_path, tiny_json(model_type), stacked=stacked).state_dict()
    checkpoint = Checkpoint.open(tmp_path)
    for layer in checkpoint.config.moe_layers:
        for expert in range(checkpoint.config.num_experts):
            found = checkpoint.read_expert(layer, expert)
            _assert_same_expert(found, state, f"model.layers.{layer}.mlp.experts.", expert)
    assert found.nbytes == checkpoint.expert_nbytes()


def _assert_same_expert(
    found: ExpertTensors, state: dict[str, torch.Tensor], prefix: str, expert: int
) -> None:
    gate_up = state[prefix + "gate_up_proj"][expert].numpy()
    down = state[prefix + "down_proj"][expert].numpy()
    bias = state.get(prefix + "gate_up_proj_bias")
    if bias is None:
        assert found.gate_up_bias is None
        assert found.down_bias is None
    else:  # gpt-oss: columns instead of rows, gate and up in turns
        gate_up = np.concatenate((gate_up[:, ::2].T, gate_up[:, 1::2].T))
        down = down.T
        row = bias[expert].numpy()
        assert found.gate_up_bias is not None
        assert found.down_bias is not None
        np.testing.assert_array_equal(
            np.concatenate((row[::2], row[1::2])), found.gate_up_bias.data
        )
        down_bias = state[prefix + "down_proj_bias"][expert].numpy()
        np.testing.assert_array_equal(down_bias, found.down_bias.data)
    np.testing.assert_array_equal(gate_up, found.gate_up.data)
    np.testing.assert_array_equal(down, found.down.data)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_attention_parameters_are_whole_tensors_of_transformers(
    model_type: str, tmp_path: Path
) -> None:
    """Each is the tensors that its rule names, one below the other, and each tensor is in one."""
    state = save_hub_model(tmp_path, tiny_json(model_type)).state_dict()
    checkpoint = Checkpoint.open(tmp_path)
    rules = {r.parameter: r for r in FAMILIES[model_type].attention_rules(checkpoint.config)}
    used = set()
    for name, tensor in parameters_of(checkpoint).items():
        sources = [_in_memory(source.names, state) for source in rules[name].sources]
        used |= set(sources)
        expected = np.concatenate([state[source].numpy() for source in sources])
        np.testing.assert_array_equal(expected, tensor.data, err_msg=name)
        assert tensor.shape == rules[name].shape
    tied = {"lm_head.weight"} if checkpoint.config.tie_word_embeddings else set()
    assert {name for name in state if ".experts." not in name} - used == tied


def _in_memory(names: tuple[str, ...], state: dict[str, torch.Tensor]) -> str:
    """The name that a weight has in a model of transformers."""
    (found,) = [name for name in names if name in state]
    return found


@pytest.mark.parametrize("model_type", MOE)
@pytest.mark.parametrize("stacked", [False, True])
def test_an_expert_costs_its_own_bytes_only(model_type: str, stacked: bool, tmp_path: Path) -> None:
    """Stacked, transposed or not: no byte of another expert is read."""
    read: list[int] = []

    def counting(descriptor: int, buffer: memoryview, offset: int) -> int:
        read.append(len(buffer))
        return pread_into(descriptor, buffer, offset)

    save_hub_model(tmp_path, tiny_json(model_type), stacked=stacked)
    checkpoint = Checkpoint.open(tmp_path, read_into=counting)
    layer = checkpoint.config.moe_layers[-1]
    read.clear()
    expert = checkpoint.read_expert(layer, 1)
    assert sum(read) == expert.nbytes


def _change_file(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("model_type", "extra"),
    [
        ("deepseek_v3", ("model.layers.3.eh_proj.weight", "model.layers.3.mlp.gate.weight")),
        ("kimi_k2", ("model.layers.3.eh_proj.weight", "model.layers.3.enorm.weight")),
        ("mimo_v2_flash", ("model.mtp.layers.0.eh_proj.weight",)),
        ("qwen3", ("model.layers.1.self_attn.rotary_emb.inv_freq",)),
    ],
)
def test_declared_leftovers_are_not_read(
    model_type: str, extra: tuple[str, ...], tmp_path: Path
) -> None:
    """Modules for speculation and old buffers may lie in the files."""
    save_hub_model(tmp_path, tiny_json(model_type))
    expected = {name: t.data for name, t in parameters_of(Checkpoint.open(tmp_path)).items()}
    _change_file(tmp_path, lambda tensors: tensors.update({name: np.ones(3) for name in extra}))
    found = {name: t.data for name, t in parameters_of(Checkpoint.open(tmp_path)).items()}
    assert found.keys() == expected.keys()


@pytest.mark.parametrize(
    ("model_type", "extra"),
    [
        ("deepseek_v3", "model.layers.3.mlp.gate.weight"),  # nothing says that it is the module
        ("deepseek_v3", "model.layers.4.eh_proj.weight"),
        ("deepseek_v2", "model.layers.3.eh_proj.weight"),
        ("mimo_v2_flash", "mtp.layers.0.eh_proj.weight"),
        ("qwen3", "model.layers.0.self_attn.q_proj.bias"),
        ("gemma2", "model.layers.0.self_attn.q_norm.weight"),
        ("olmoe", "model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_other_leftovers_are_refused(model_type: str, extra: str, tmp_path: Path) -> None:
    """A tensor without a use means that config and files do not belong together."""
    save_hub_model(tmp_path, tiny_json(model_type))
    _change_file(tmp_path, lambda tensors: tensors.update({extra: np.ones(3, np.float32)}))
    with pytest.raises(CheckpointError, match=f"tensor {re.escape(extra)}: not a tensor of"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_missing_or_misshapen_tensor_is_named(model_type: str, tmp_path: Path) -> None:
    """One tensor of each kind at a time is taken away, or gets another shape."""
    save_hub_model(tmp_path, tiny_json(model_type))
    whole = load_file(tmp_path / "model.safetensors")
    kinds = {re.sub(r"\d+", "*", name): name for name in whole}
    for name in kinds.values():
        for other in (None, np.ones((2, 3, 5, 7), np.float32)):
            tensors = {key: tensor for key, tensor in whole.items() if key != name}
            if other is not None:
                tensors[name] = other
            save_file(tensors, tmp_path / "model.safetensors")
            with pytest.raises(CheckpointError) as caught:
                Checkpoint.open(tmp_path)
            assert name in caught.value.message
            assert caught.value.fix
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_every_kind_of_weight_has_to_be_finite(
    model_type: str, value: float, tmp_path: Path
) -> None:
    """The last element of each kind of tensor in turn, norms, biases and sinks among them."""
    save_hub_model(tmp_path, tiny_json(model_type))
    whole = load_file(tmp_path / "model.safetensors")
    for name in {re.sub(r"\d+", "*", name): name for name in whole}.values():
        damaged = whole[name].copy()
        damaged.reshape(-1)[-1] = value
        save_file(whole | {name: damaged}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"tensor {re.escape(name)}: holds NaN or inf"):
            _read_all(Checkpoint.open(tmp_path))


def _read_all(checkpoint: Checkpoint) -> None:
    parameters_of(checkpoint)
    for layer in checkpoint.config.moe_layers:
        for expert in range(checkpoint.config.num_experts):
            checkpoint.read_expert(layer, expert)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "mimo_v2_flash", "gpt_oss"])
def test_gates_may_be_stored_wider_than_the_rest(model_type: str, tmp_path: Path) -> None:
    """Real files keep gates and their biases in float32 while `dtype` says bfloat16."""
    save_hub_model(tmp_path, tiny_json(model_type))

    def narrow(tensors: dict[str, np.ndarray]) -> None:
        for name, tensor in tensors.items():
            if ".gate." not in name and ".router." not in name:
                tensors[name] = tensor.astype(np.float16)

    _change_file(tmp_path, narrow)
    found = parameters_of(Checkpoint.open(tmp_path))
    wide = {name for name, tensor in found.items() if tensor.dtype == "float32"}
    assert wide == {n for n in found if n.endswith((".gate", ".gate_bias", ".selection_bias"))}


def test_hub_model_is_random_everywhere(tmp_path: Path) -> None:
    """Zeros or ones would hide that two tensors were exchanged."""
    for tensor in hub_model(tmp_path, tiny_json("deepseek_v3")).state_dict().values():
        assert tensor.unique().numel() > 1
