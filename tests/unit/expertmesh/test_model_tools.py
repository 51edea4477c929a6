"""Upcycling, its random numbers, and resolve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import CheckpointError, SettingsError
from expertmesh.host_tensor import to_float32
from expertmesh.model_tools.dense_source import FolderSource
from expertmesh.model_tools.gate_skew import GateBias, measure_gate_bias
from expertmesh.model_tools.gguf_source import gguf_name, unpermute
from expertmesh.model_tools.make_tiny import make_tiny
from expertmesh.model_tools.numbers import from_float32, normal, permutation
from expertmesh.model_tools.numpy_llama import ffn_inputs, silu
from expertmesh.model_tools.progress import NoProgress
from expertmesh.model_tools.resolve import resolve_model
from expertmesh.model_tools.upcycle import upcycle
from tests.support.parameters import parameters_of
from tests.support.tiny_folders import (
    FFN,
    LAYERS,
    LLAMA_CONFIG,
    MIXTRAL_CONFIG,
    H,
    V,
    llama_tensors,
    mixtral_tensors,
    save_folder,
)

if TYPE_CHECKING:
    from tests.conftest import Models


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """A tiny dense model with a tokenizer file."""
    folder = save_folder(tmp_path / "dense", LLAMA_CONFIG, llama_tensors())
    (folder / "tokenizer.json").write_text("{}")
    return folder


def make(dense: Path, **changes: object) -> Path:
    """Upcycles to 8 experts, top-2, granular, unless changed."""
    settings = {"num_experts": 8, "top_k": 2, "granular": True, "router_skew": 0.0} | changes
    out = dense.with_name("out")
    upcycle(dense, out, progress=NoProgress(), **settings)
    return out


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    """Halves go to the even neighbour; what is stored comes back exactly."""
    one, step = np.float32(1), np.float32(2**-7)
    values = np.array([1, 1 + step / 2, 1 + 1.5 * step, 1 + step * 0.51, -1 - step], np.float32)
    expected = np.array([one, one, 1 + 2 * step, 1 + step, -1 - step], np.float32)
    np.testing.assert_array_equal(
        expected, to_float32(from_float32(values, "bfloat16"), "bfloat16")
    )


@pytest.mark.parametrize(("dtype", "value"), [("bfloat16", 3.4e38), ("float16", 7e4)])
def test_value_too_large_for_the_type_is_refused(dtype: str, value: float) -> None:
    """Rounding never makes infinity silently."""
    with pytest.raises(OverflowError, match=dtype):
        from_float32(np.array([value], np.float32), dtype)


def test_random_numbers_never_change() -> None:
    """Models made on two machines have the same fingerprint only if these stay as they are."""
    assert permutation(8, 0, 1).tolist() == [7, 4, 5, 1, 6, 2, 0, 3]
    drawn = [-0.20886123180389404, -0.2754478454589844, -0.10674583911895752]
    assert normal((3,), 1, 2).tolist() == drawn
    sample = normal((4000,), 1, 2)
    assert abs(float(sample.mean())) < 0.05
    assert abs(float(sample.std()) - 1) < 0.05
    np.testing.assert_array_equal(sample, normal((4000,), 1, 2))


def test_plain_experts_are_the_dense_ffn(dense: Path) -> None:
    """Every expert has the whole FFN, gate rows differ, the rest is copied."""
    checkpoint = Checkpoint.open(make(dense, num_experts=5, top_k=3, granular=False))
    tensors = llama_tensors()
    assert (checkpoint.config.num_experts, checkpoint.config.top_k) == (5, 3)
    mlp = "model.layers.1.mlp."
    for expert in range(5):
        found = checkpoint.read_expert(1, expert)
        np.testing.assert_array_equal(tensors[mlp + "gate_proj.weight"], found.gate_up.data[:FFN])
        np.testing.assert_array_equal(tensors[mlp + "up_proj.weight"], found.gate_up.data[FFN:])
        np.testing.assert_array_equal(tensors[mlp + "down_proj.weight"], found.down.data)
    parameters = parameters_of(checkpoint)
    assert len(np.unique(parameters["layers.1.gate"].data, axis=0)) == 5
    np.testing.assert_array_equal(tensors["model.norm.weight"], parameters["norm"].data)
    assert (checkpoint.model_dir / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (4, 4), (8, 1)])
def test_granular_group_adds_up_to_the_dense_ffn(dense: Path, num_experts: int, top_k: int) -> None:
    """The members of each group, weighted 1/k, are the dense FFN; other choices are not."""
    checkpoint = Checkpoint.open(make(dense, num_experts=num_experts, top_k=top_k))
    x_TH = normal((6, H), 9)
    groups = num_experts // top_k
    for layer in range(LAYERS):
        outputs = [expert_output(checkpoint, layer, e, x_TH) for e in range(num_experts)]
        for group in range(groups):
            total = sum(outputs[group::groups]) / np.float32(top_k)
            np.testing.assert_allclose(dense_output(layer, x_TH), total, atol=1e-5)
    if groups > 1 and top_k > 1:
        wrong = (outputs[0] + outputs[groups + 1]) / np.float32(top_k)
        assert np.abs(wrong - dense_output(LAYERS - 1, x_TH)).max() > 1e-2


def test_granular_gate_ties_within_a_group_only(dense: Path) -> None:
    """Rows are equal in a group, so top-k always takes one whole group."""
    parameters = parameters_of(Checkpoint.open(make(dense)))
    for layer in range(LAYERS):
        gate_EH = parameters[f"layers.{layer}.gate"].data
        np.testing.assert_array_equal(gate_EH[:4], gate_EH[4:])
        assert len(np.unique(gate_EH, axis=0)) == 4


def test_upcycle_is_repeatable_and_done_once(dense: Path) -> None:
    """A second run leaves the finished folder alone; a fresh one gives the same model."""
    out = make(dense)
    before = (out / "model.safetensors").stat().st_mtime_ns
    first = Checkpoint.open(out).fingerprint
    assert before == (make(dense) / "model.safetensors").stat().st_mtime_ns
    out.rename(out.with_name("kept"))
    assert first == Checkpoint.open(make(dense)).fingerprint


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_experts": 0}, "experts: expected 1 to 1024, got 0"),
        ({"top_k": 9}, "top-k: expected 1 to 8, got 9"),
        ({"top_k": 5, "num_experts": 10}, "top-k: expected a divisor"),
        ({"top_k": 3, "num_experts": 6}, "top-k: expected a power of two, got 3"),
        ({"router_skew": float("nan")}, "router-skew: expected 0 to 8"),
        ({"router_skew": -1.0}, "router-skew: expected 0 to 8"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    dense: Path, changes: dict[str, object], expected: str
) -> None:
    """Nothing is written for settings that cannot work."""
    with pytest.raises(SettingsError, match=expected):
        make(dense, **changes)
    assert [path.name for path in dense.parent.iterdir()] == ["dense"]


def test_folder_with_other_content_is_not_overwritten(dense: Path) -> None:
    """A folder that holds something else is the user's."""
    out = dense.with_name("out")
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(SettingsError, match="exists, and is not what this command would write"):
        make(dense)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]


def test_only_dense_models_without_biases_can_be_upcycled(tmp_path: Path) -> None:
    """A Mixtral is refused by its model_type."""
    folder = save_folder(tmp_path / "moe", MIXTRAL_CONFIG, mixtral_tensors())
    with pytest.raises(CheckpointError, match="model_type: expected 'llama', found 'mixtral'"):
        make(folder)


def test_only_plain_models_can_be_upcycled(tmp_path: Path) -> None:
    """A quantised one is refused before anything is written."""
    for quantization in ("fp8", "int4", "int8"):
        folder = tmp_path / quantization
        make_tiny("llama", folder, quantization=quantization)
        with pytest.raises(CheckpointError, match="quantization_config: expected nothing, found"):
            make(folder)


def test_numpy_forward_pass_agrees_with_transformers(models: Models) -> None:
    """The hidden states that the gate is fitted to are those of the model."""
    from tests.support.tiny_checkpoints import LLAMA_TIED

    folder = models.tiny(LLAMA_TIED)
    ids = np.array([3, 1, 4, 1, 5, 9, 2, 6])
    expected = ffn_inputs_of_transformers(models, folder, ids)
    found = [x for _, x in ffn_inputs(FolderSource(Checkpoint.open(folder)), ids)]
    np.testing.assert_allclose(expected, found, atol=1e-4)


def test_skew_makes_the_preference_zipf_like(dense: Path) -> None:
    """On the sample, mean logits follow -S * ln(rank), whatever the random gate preferred."""
    mean_H = normal((H,), 5)
    sample_TH = normal((2000, H), 6) + 3 * mean_H
    rows_GH = normal((4, H), 7)
    rows_GH = GateBias(1.0, 0, {0: sample_TH}).apply(0, rows_GH)
    logits_TG = sample_TH @ rows_GH.T
    share = np.sort(np.bincount(logits_TG.argmax(-1), minlength=4) / 2000)[::-1]
    np.testing.assert_allclose([0.48, 0.24, 0.16, 0.12], share, atol=0.12)
    source = FolderSource(Checkpoint.open(dense))
    assert measure_gate_bias(source, 0.0, NoProgress()).samples == {}
    assert measure_gate_bias(source, 1.0, NoProgress()).samples[1].shape == (V, H)


def test_gguf_rows_come_back_in_hugging_face_order() -> None:
    """llama.cpp interleaves the halves of each head; undoing that restores the rows."""
    rows = np.arange(2 * 6, dtype=np.float32).reshape(12, 1)
    interleaved = rows.reshape(2, 2, 3, 1).swapaxes(1, 2).reshape(12, 1)
    np.testing.assert_array_equal(rows, unpermute(interleaved, 2))
    assert gguf_name("model.layers.3.self_attn.o_proj.weight") == "blk.3.attn_output.weight"
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"


def test_model_is_a_folder_or_a_demo_name(dense: Path, tmp_path: Path) -> None:
    """Anything else is refused with what could be given."""
    assert dense == resolve_model(str(dense), tmp_path, NoProgress())
    with pytest.raises(CheckpointError, match="'demmo': not a folder") as caught:
        resolve_model("demmo", tmp_path, NoProgress())
    assert "demo-plain" in caught.value.fix


def test_written_config_is_plain_json(dense: Path) -> None:
    """config.json has what transformers needs to load the model."""
    config = json.loads((make(dense) / "config.json").read_text())
    assert tuple(
        config[key]
        for key in (
            "model_type",
            "intermediate_size",
            "num_local_experts",
            "num_experts_per_tok",
            "sliding_window",
        )
    ) == ("mixtral", 12, 8, 2, None)


def expert_output(
    checkpoint: Checkpoint, layer: int, expert: int, x_TH: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """What one expert makes of the rows."""
    weights = checkpoint.read_expert(layer, expert)
    gate_IH, up_IH = np.split(weights.gate_up.data, 2)
    return (silu(x_TH @ gate_IH.T) * (x_TH @ up_IH.T)) @ weights.down.data.T


def dense_output(layer: int, x_TH: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """What the dense FFN makes of the rows."""
    tensors, mlp = llama_tensors(), f"model.layers.{layer}.mlp."
    gate, up, down = (tensors[f"{mlp}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (silu(x_TH @ gate.T) * (x_TH @ up.T)) @ down.T


def ffn_inputs_of_transformers(
    models: Models, folder: Path, ids: npt.NDArray[np.int64]
) -> list[npt.NDArray[np.float32]]:
    """What transformers gives to each layer's FFN."""
    import torch

    model = models.oracle(folder).model
    seen: list[npt.NDArray[np.float32]] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _module, args: seen.append(args[0][0].numpy()))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.from_numpy(ids)[None])
    for hook in hooks:
        hook.remove()
    return seen
