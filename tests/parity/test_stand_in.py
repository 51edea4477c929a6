"""A small model of zeros asks for the kernels of the model that it stands in for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.family_folders import FamilyFolders
from tests.support.kernels_used import kernels_used
from tests.support.tiny_families import CASES


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> FamilyFolders:
    """Checkpoints of all cases."""
    return FamilyFolders(tmp_path_factory.mktemp("families"))


def _check(kind: str, model: Path, dtype: str = "auto") -> None:
    wanted = kernels_used(kind, model, dtype)
    assert wanted, "the test shows nothing"
    assert set() == wanted - kernels_used(f"small-{kind}", model, dtype)


def test_the_same_kernels(text_model: Path) -> None:
    """Of an attention worker that has its experts elsewhere."""
    _check("attention", text_model)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["colocated", "expert"])
def test_the_same_kernels_for_experts(text_model: Path, kind: str, dtype: str) -> None:
    """Of workers with experts."""
    _check(kind, text_model, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_same_kernels_of_all_families(folders: FamilyFolders, name: str) -> None:
    """Whatever layers consist of."""
    _check("colocated", folders.served(name), "bfloat16")
