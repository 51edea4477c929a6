"""Opening and reading model folders: exact content, exact bytes, one clear line on any fault."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import CheckpointError
from expertmesh.safetensors_file import pread_into
from tests.support.parameters import parameters_of
from tests.support.tiny_folders import (
    FFN,
    LLAMA_CONFIG,
    MIXTRAL_CONFIG,
    E,
    H,
    Tensors,
    fused,
    llama_tensors,
    mixtral_tensors,
    save_folder,
    save_index,
    save_sharded,
)

EXPERT = "model.layers.1.block_sparse_moe.experts.2."
FIRST_SHARD = "model-00001-of-00002.safetensors"


def test_parameters_are_stacked_under_our_names(tmp_path: Path) -> None:
    """Query, key and value, and gate and up, become one parameter each, in forward order."""
    tensors = llama_tensors()
    found = parameters_of(Checkpoint.open(save_folder(tmp_path, LLAMA_CONFIG, tensors)))
    layer = [f"layers.{{}}.{n}" for n in ("input_norm", "qkv", "o", "ffn_norm")]
    layer += ["layers.{}.gate_up", "layers.{}.down"]
    names = [name.format(i) for i in (0, 1) for name in layer]
    assert ["embed", *names, "norm", "lm_head"] == list(found)
    prefix = "model.layers.1.self_attn."
    expected = np.concatenate([tensors[f"{prefix}{x}_proj.weight"] for x in "qkv"])
    np.testing.assert_array_equal(expected, found["layers.1.qkv"].data)
    assert found["layers.1.qkv"].data.flags.writeable
    assert found["layers.1.qkv"].data.flags.owndata


def test_biases_are_parameters_of_their_own(tmp_path: Path) -> None:
    """`attention_bias` and `mlp_bias` ask for bias tensors, stacked like their weights."""
    tensors = llama_tensors()
    for name, data in list(tensors.items()):
        if "_proj" in name:
            tensors[name.replace(".weight", ".bias")] = np.full(len(data), len(name), np.float32)
    config = LLAMA_CONFIG | {"attention_bias": True, "mlp_bias": True}
    found = parameters_of(Checkpoint.open(save_folder(tmp_path, config, tensors)))
    shapes = {name: t.shape for name, t in found.items() if name.endswith("_bias")}
    assert {
        f"layers.{i}.{name}": (size,)
        for i in (0, 1)
        for name, size in (
            ("qkv_bias", 32),
            ("o_bias", H),
            ("gate_up_bias", 2 * FFN),
            ("down_bias", H),
        )
    } == shapes


@pytest.mark.parametrize(
    "layout",
    [dict, lambda t: fused(t, "mlp."), lambda t: fused(t, "block_sparse_moe.")],
    ids=["per-expert", "fused", "fused-old-prefix"],
)
@pytest.mark.parametrize("save", [save_folder, save_sharded])
def test_expert_is_the_same_in_every_layout(
    tmp_path: Path,
    layout: Callable[[Tensors], Tensors],
    save: Callable[[Path, dict[str, object], Tensors], Path],
) -> None:
    """Tensors per expert, stacked ones, one file or shards: the same expert comes out."""
    tensors = mixtral_tensors()
    checkpoint = Checkpoint.open(save(tmp_path, MIXTRAL_CONFIG, layout(tensors)))
    expert = checkpoint.read_expert(1, 2)
    gate_up = np.concatenate((tensors[EXPERT + "w1.weight"], tensors[EXPERT + "w3.weight"]))
    np.testing.assert_array_equal(gate_up, expert.gate_up.data)
    np.testing.assert_array_equal(tensors[EXPERT + "w2.weight"], expert.down.data)
    assert 3 * FFN * H * 4 == checkpoint.expert_nbytes() == expert.nbytes
    with pytest.raises(KeyError):
        checkpoint.read_expert(1, E)


@pytest.mark.parametrize("layout", [dict, fused], ids=["per-expert", "fused"])
def test_reading_an_expert_reads_its_bytes_only(
    tmp_path: Path, layout: Callable[[Tensors], Tensors]
) -> None:
    """After opening, one expert costs exactly its own bytes from the disk."""
    read: list[int] = []

    def counting(descriptor: int, buffer: memoryview, offset: int) -> int:
        read.append(len(buffer))
        return pread_into(descriptor, buffer, offset)

    folder = save_folder(tmp_path, MIXTRAL_CONFIG, layout(mixtral_tensors()))
    checkpoint = Checkpoint.open(folder, read_into=counting)
    read.clear()
    checkpoint.read_expert(0, 3)
    assert checkpoint.expert_nbytes() == sum(read)


def test_short_reads_are_continued(tmp_path: Path) -> None:
    """The system may return fewer bytes than asked for; the rest is read after them."""

    def slow(descriptor: int, buffer: memoryview, offset: int) -> int:
        return pread_into(descriptor, buffer[:100], offset)

    tensors = mixtral_tensors()
    folder = save_folder(tmp_path, MIXTRAL_CONFIG, tensors)
    expert = Checkpoint.open(folder, read_into=slow).read_expert(1, 2)
    np.testing.assert_array_equal(tensors[EXPERT + "w2.weight"], expert.down.data)


def test_bfloat16_is_kept_as_its_bits(tmp_path: Path) -> None:
    """numpy has no bfloat16, so the bits come as uint16, untouched."""
    tensors = llama_tensors()
    bits = {name: (t.view(np.uint32) >> 16).astype(np.uint16) for name, t in tensors.items()}
    folder = save_folder(tmp_path, LLAMA_CONFIG | {"dtype": "bfloat16"}, bits)
    _relabel(folder / "model.safetensors", '"U16"', '"BF16"')
    found = parameters_of(Checkpoint.open(folder))
    assert found["norm"].dtype == "bfloat16"
    np.testing.assert_array_equal(bits["model.norm.weight"], found["norm"].data)


def test_tensors_may_have_types_of_their_own(tmp_path: Path) -> None:
    """Files mix types: each tensor keeps its own, and parts of a parameter meet in float32."""
    tensors = mixtral_tensors()
    norm, query = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
    gate = EXPERT + "w1.weight"
    for name in (norm, query, gate):
        tensors[name] = tensors[name].astype(np.float16)
    checkpoint = Checkpoint.open(save_folder(tmp_path, MIXTRAL_CONFIG, tensors))
    found = parameters_of(checkpoint)
    assert (found["norm"].dtype, found["embed"].dtype) == ("float16", "float32")
    np.testing.assert_array_equal(tensors[norm], found["norm"].data)
    assert found["layers.0.qkv"].dtype == "float32"
    np.testing.assert_array_equal(tensors[query], found["layers.0.qkv"].data[:H])
    gate_up = checkpoint.read_expert(1, 2).gate_up
    assert gate_up.dtype == "float32"
    np.testing.assert_array_equal(tensors[gate], gate_up.data[:FFN])


def test_tied_output_may_be_absent_or_an_equal_copy(tmp_path: Path) -> None:
    """A tied lm_head is no parameter; a stored copy has to equal the embedding."""
    config = LLAMA_CONFIG | {"tie_word_embeddings": True}
    tensors = llama_tensors()
    folder = save_folder(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: differs from the embedding"):
        parameters_of(Checkpoint.open(folder))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_folder(folder, config, tensors)
    assert "lm_head" not in parameters_of(Checkpoint.open(folder))
    del tensors["lm_head.weight"]
    save_folder(folder, config, tensors)
    assert "lm_head" not in parameters_of(Checkpoint.open(folder))


def test_fingerprint_tells_models_apart_and_not_files(tmp_path: Path) -> None:
    """Shards or one file are the same model; another weight or setting is another."""
    tensors = mixtral_tensors()
    one = Checkpoint.open(save_folder(tmp_path / "one", MIXTRAL_CONFIG, tensors)).fingerprint
    two = Checkpoint.open(save_sharded(tmp_path / "two", MIXTRAL_CONFIG, tensors)).fingerprint
    assert one == two
    assert len(one) == 32
    changed = MIXTRAL_CONFIG | {"num_experts_per_tok": 1}
    three = Checkpoint.open(save_folder(tmp_path / "three", changed, tensors)).fingerprint
    tensors[EXPERT + "w2.weight"][0, 0] += 1
    four = Checkpoint.open(save_folder(tmp_path / "four", MIXTRAL_CONFIG, tensors)).fingerprint
    assert len({one, three, four}) == 3


def test_known_buffers_are_left_out(tmp_path: Path) -> None:
    """Buffers of old exports that are computed from the config are not extra tensors."""
    tensors = llama_tensors()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    checkpoint = Checkpoint.open(save_folder(tmp_path, LLAMA_CONFIG, tensors))
    assert not [name for name in parameters_of(checkpoint) if "inv_freq" in name]


def _drop(tensors: Tensors) -> None:
    del tensors[EXPERT + "w3.weight"]


def _add(tensors: Tensors) -> None:
    tensors["model.layers.0.extra.weight"] = np.ones(3, np.float32)


def _misshape(tensors: Tensors) -> None:
    tensors[EXPERT + "w2.weight"] = np.ones((FFN, H), np.float32)


def _integers(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = np.ones(H, np.int8)


def _drop_output(tensors: Tensors) -> None:
    del tensors["lm_head.weight"]


def _both_layouts(tensors: Tensors) -> None:
    tensors |= {name: data for name, data in fused(tensors).items() if ".experts." in name}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_drop, f"tensor {EXPERT}w3.weight: expected once, found nowhere"),
        (_add, "tensor model.layers.0.extra.weight: not a tensor of the family mixtral"),
        (_misshape, f"tensor {EXPERT}w2.weight: expected shape [16, 24], found [24, 16]"),
        (_integers, "tensor model.norm.weight: expected type F32 or BF16 or F16 as gates, norms"),
        (_drop_output, "tensor lm_head.weight: expected once, found nowhere"),
        (_both_layouts, "not a tensor of the family mixtral"),
    ],
)
def test_wrong_content_is_named(
    tmp_path: Path, change: Callable[[Tensors], None], expected: str
) -> None:
    """A missing, extra, misshapen or mistyped tensor gives one line with a fix."""
    tensors = mixtral_tensors()
    change(tensors)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(save_folder(tmp_path, MIXTRAL_CONFIG, tensors))
    assert expected in caught.value.message
    assert caught.value.fix != ""
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_weights_have_to_be_finite(tmp_path: Path, value: float, dtype: type) -> None:
    """NaN and infinity are found when a tensor is read."""
    tensors = {name: data.astype(dtype) for name, data in mixtral_tensors().items()}
    tensors[EXPERT + "w2.weight"][3, 4] = value
    config = MIXTRAL_CONFIG | {"dtype": np.dtype(dtype).name}
    checkpoint = Checkpoint.open(save_folder(tmp_path, config, tensors))
    checkpoint.read_expert(1, 1)
    with pytest.raises(CheckpointError, match=r"2\.w2\.weight: holds NaN or infinity"):
        checkpoint.read_expert(1, 2)


def test_bfloat16_infinity_is_found(tmp_path: Path) -> None:
    """The bits of infinity are recognised without converting."""
    bits = {name: np.zeros(t.shape, np.uint16) for name, t in llama_tensors().items()}
    bits["model.norm.weight"][5] = 0xFF80
    folder = save_folder(tmp_path, LLAMA_CONFIG | {"dtype": "bfloat16"}, bits)
    _relabel(folder / "model.safetensors", '"U16"', '"BF16"')
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: holds NaN or infinity"):
        parameters_of(Checkpoint.open(folder))


@pytest.mark.parametrize("keep", [0, 5, 100, -100, -1])
def test_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    """A file cut anywhere is named, before any weight is read."""
    path = save_folder(tmp_path, LLAMA_CONFIG, llama_tensors()) / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a complete"):
        Checkpoint.open(tmp_path)


def test_file_with_bytes_after_its_end_is_refused(tmp_path: Path) -> None:
    """Bytes that belong to no tensor mean a damaged file."""
    path = save_folder(tmp_path, LLAMA_CONFIG, llama_tensors()) / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"x" * 100)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a complete"):
        Checkpoint.open(tmp_path)


def test_file_truncated_while_open_is_an_error_and_no_crash(tmp_path: Path) -> None:
    """A file cut in place under an open checkpoint is named; no signal ends the process."""
    folder = save_folder(tmp_path, MIXTRAL_CONFIG, mixtral_tensors())
    checkpoint = Checkpoint.open(folder)
    os.truncate(folder / "model.safetensors", 3000)
    with pytest.raises(CheckpointError, match="file ends at byte"):
        checkpoint.read_expert(1, E - 1)


def test_file_replaced_while_open_changes_nothing(tmp_path: Path) -> None:
    """A new file of the same name is not seen by an open checkpoint."""
    folder = save_folder(tmp_path, MIXTRAL_CONFIG, mixtral_tensors(seed=0))
    checkpoint = Checkpoint.open(folder)
    before = checkpoint.read_expert(0, 0).down.data
    save_file(mixtral_tensors(seed=1), tmp_path / "new")
    os.replace(tmp_path / "new", folder / "model.safetensors")
    np.testing.assert_array_equal(before, checkpoint.read_expert(0, 0).down.data)


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    """A folder of pickles, and a pickle under another name, are refused with the way out."""
    folder = save_folder(tmp_path, LLAMA_CONFIG, {})
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"found only pickles \(pytorch_model\.bin\)"):
        Checkpoint.open(folder)
    (folder / "model.safetensors").write_bytes(pickle.dumps({"a": list(range(9))}))
    with pytest.raises(CheckpointError, match="expected safetensors, found a pickle"):
        Checkpoint.open(folder)


def test_folder_without_weights_says_what_is_missing(tmp_path: Path) -> None:
    """A config alone is not a model."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    with pytest.raises(CheckpointError, match="found neither"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("../model.safetensors", "expected the name of a .safetensors file"),
        ("/etc/passwd", "expected the name of a .safetensors file"),
        ("config.json", "expected the name of a .safetensors file"),
        ("a\0.safetensors", "expected the name of a .safetensors file"),
        (7, "expected a file name"),
        (["x"], "expected a file name"),
        ("absent.safetensors", "absent.safetensors: missing, but named by"),
        ("link.safetensors", "leads outside the folder"),
        ("loop.safetensors", "loop.safetensors"),
        ("fifo.safetensors", "expected a regular file"),
        ("again.safetensors", "two of its file names lead to the same file"),
    ],
)
def test_index_cannot_name_anything_but_files_of_the_folder(
    tmp_path: Path, name: object, expected: str
) -> None:
    """Paths, links that lead out, loops, pipes and doubled files are refused."""
    folder = save_sharded(tmp_path / "model", LLAMA_CONFIG, llama_tensors())
    (tmp_path / "outside.safetensors").touch()
    (folder / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    (folder / "again.safetensors").symlink_to(FIRST_SHARD)
    os.mkfifo(folder / "fifo.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = name
    save_index(folder, index["weight_map"])
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert expected in caught.value.message


def test_index_and_shards_have_to_agree(tmp_path: Path) -> None:
    """A tensor twice, elsewhere than the index says, or not in it, is named."""
    folder = save_sharded(tmp_path, LLAMA_CONFIG, llama_tensors())
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    save_index(folder, {k: v for k, v in weight_map.items() if k != "model.norm.weight"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: not in"):
        Checkpoint.open(folder)
    save_index(folder, weight_map | {"ghost": FIRST_SHARD})
    with pytest.raises(CheckpointError, match=r"ghost: expected in .*, found nowhere"):
        Checkpoint.open(folder)
    save_index(folder, weight_map)
    save_file(llama_tensors(), folder / FIRST_SHARD)
    with pytest.raises(CheckpointError, match="expected once, found in"):
        Checkpoint.open(folder)


def test_shards_of_the_hugging_face_cache_are_followed(tmp_path: Path) -> None:
    """There, the files of a snapshot are links to blobs beside it."""
    snapshot = tmp_path / "models--x" / "snapshots" / "main"
    save_folder(snapshot, LLAMA_CONFIG, llama_tensors())
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    (snapshot / "model.safetensors").rename(blobs / "abc")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    assert Checkpoint.open(snapshot).config.family == "llama"


def test_two_sets_of_weights_are_refused(tmp_path: Path) -> None:
    """With a single file and an index it is not known which one is meant."""
    folder = save_sharded(tmp_path, LLAMA_CONFIG, llama_tensors())
    save_folder(folder, LLAMA_CONFIG, llama_tensors())
    with pytest.raises(CheckpointError, match="holds both"):
        Checkpoint.open(folder)


def _relabel(path: Path, old: str, new: str) -> None:
    """Changes a type code in the header of a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(old.encode(), new.encode())
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
