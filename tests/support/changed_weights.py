"""Copies of a checkpoint in which one weight of one expert is another one."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from expertmesh.checkpoint import Checkpoint
from expertmesh.safetensors_file import SafetensorsFile


def with_changed_weight(
    model: Path, folder: Path, tensor: str, *, index: int = 1000, value: float | None = None
) -> Path:
    """Copies a model of one file, and changes one number of a tensor of it; returns the copy.

    Args:
        model: Folder; its fingerprint is the copy's, as that looks at the ends of tensors only.
        folder: Of the copy.
        tensor: Of float32.
        index: Of the number.
        value: What it becomes; by default it is negated.
    """
    shutil.copytree(model, folder)
    path = folder / "model.safetensors"
    file = SafetensorsFile(path)
    header = file.tensors[tensor]
    file.close()
    weights = np.memmap(path, np.float32, "r+", header.offset, header.nbytes // 4)
    assert weights[index] != 0.0
    weights[index] = -weights[index] if value is None else value
    weights.flush()
    assert Checkpoint.open(folder).fingerprint == Checkpoint.open(model).fingerprint
    return folder
