"""Fingerprints of experts: what changes them, and what does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from expertmesh.checkpoint import Checkpoint
from expertmesh.expert_fingerprint import ExpertFingerprint, read_fingerprint
from expertmesh.model_tools.make_tiny import make_tiny
from expertmesh.safetensors_file import SafetensorsFile
from tests.support.quantized_folders import INT8, quantized_folder, read_parts, write_parts
from tests.support.tiny_folders import (
    FFN,
    MIXTRAL_CONFIG,
    E,
    H,
    fused,
    mixtral_tensors,
    save_folder,
    save_sharded,
)

EXPERT = "model.layers.1.block_sparse_moe.experts.2."


def fingerprints(folder: Path) -> dict[tuple[int, int], int]:
    """Of all experts."""
    checkpoint = Checkpoint.open(folder)
    keys = [(layer, expert) for layer in (0, 1) for expert in range(E)]
    return {key: read_fingerprint(checkpoint, *key) for key in keys}


@pytest.mark.parametrize("part", ["w1", "w2", "w3"])
def test_any_bit_of_an_expert_counts(tmp_path: Path, part: str) -> None:
    """A flipped bit, wherever it is, changes the fingerprint of its expert and no other."""
    tensors = mixtral_tensors()
    before = fingerprints(save_folder(tmp_path / "model", MIXTRAL_CONFIG, tensors))
    assert len(set(before.values())) == 2 * E
    bits = tensors[f"{EXPERT}{part}.weight"].view(np.uint32)
    for place in ((0, 0), (bits.shape[0] // 2, 3), (-1, -1)):
        bits[place] ^= np.uint32(1 << 9)
        after = fingerprints(save_folder(tmp_path / "model", MIXTRAL_CONFIG, tensors))
        assert {key for key in before if before[key] != after[key]} == {(1, 2)}
        bits[place] ^= np.uint32(1 << 9)


def test_tensors_that_change_places_are_told_apart(tmp_path: Path) -> None:
    """Gate and up have the same shape."""
    tensors = mixtral_tensors()
    before = fingerprints(save_folder(tmp_path / "model", MIXTRAL_CONFIG, tensors))
    w1, w3 = f"{EXPERT}w1.weight", f"{EXPERT}w3.weight"
    tensors[w1], tensors[w3] = tensors[w3], tensors[w1]
    after = fingerprints(save_folder(tmp_path / "model", MIXTRAL_CONFIG, tensors))
    assert {key for key in before if before[key] != after[key]} == {(1, 2)}


def test_files_do_not_matter(tmp_path: Path) -> None:
    """One file and shards of the same tensors have the same fingerprints, stacked tensors too."""
    tensors = mixtral_tensors()
    one = fingerprints(save_folder(tmp_path / "one", MIXTRAL_CONFIG, tensors))
    assert one == fingerprints(save_sharded(tmp_path / "shards", MIXTRAL_CONFIG, tensors))
    stacked = fused(tensors)
    whole = fingerprints(save_folder(tmp_path / "stacked", MIXTRAL_CONFIG, stacked))
    assert whole == fingerprints(save_sharded(tmp_path / "parts", MIXTRAL_CONFIG, stacked))


def test_codes_and_scales_count_however_they_are_read(tmp_path: Path) -> None:
    """Decoded or not, the same bytes are read in the same order; a scale is one of them."""
    folder = quantized_folder(tmp_path / "model", MIXTRAL_CONFIG, mixtral_tensors(), INT8)
    checkpoint, as_stored = Checkpoint.open(folder), ExpertFingerprint()
    checkpoint.read_coded_expert(1, 2, as_stored.add)
    assert as_stored.value == read_fingerprint(checkpoint, 1, 2)
    parts = read_parts(folder)
    for suffix in ("weight", "weight_scale"):
        data = parts[f"{EXPERT}w1.{suffix}"].data
        data.reshape(-1).view(np.uint8)[5] ^= 1
        write_parts(folder, parts)
        assert read_fingerprint(Checkpoint.open(folder), 1, 2) != as_stored.value
        data.reshape(-1).view(np.uint8)[5] ^= 1


def test_biases_count(tmp_path: Path) -> None:
    """Of stacked experts too."""
    make_tiny("gpt_oss", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    before = [read_fingerprint(Checkpoint.open(tmp_path / "model"), 0, e) for e in (0, 1)]
    file = SafetensorsFile(path)
    header = file.tensors["model.layers.0.mlp.experts.gate_up_proj_bias"]
    file.close()
    data = bytearray(path.read_bytes())
    data[header.offset + header.nbytes // header.shape[0] + 2] ^= 1
    path.write_bytes(data)
    after = [read_fingerprint(Checkpoint.open(tmp_path / "model"), 0, e) for e in (0, 1)]
    assert (before[0] == after[0], before[1] == after[1]) == (True, False)


def test_reading_tells_of_each_byte_once(tmp_path: Path) -> None:
    """As many as the expert has in the files."""
    sizes: list[int] = []
    folder = save_folder(tmp_path / "model", MIXTRAL_CONFIG, mixtral_tensors())
    Checkpoint.open(folder).read_expert(0, 1, lambda data: sizes.append(data.nbytes))
    assert sum(sizes) == 3 * FFN * H * 4
