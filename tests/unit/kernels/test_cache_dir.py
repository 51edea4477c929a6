"""Where compiled kernels are kept, and what happens where nothing can be."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from expertmesh_kernels import cache_dir
from expertmesh_kernels.cpu import jit


@pytest.fixture
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment of a first start, with its home in a temporary folder."""
    monkeypatch.setenv("EXPERTMESH_HOME", str(tmp_path))
    for name in ("NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(cache_dir.tempfile, "tempdir", str(tmp_path))
    return monkeypatch


def test_folders_are_chosen_once(tmp_path: Path, variables: pytest.MonkeyPatch) -> None:
    """They are under EXPERTMESH_HOME, Numba's for these sources only; a child keeps both."""
    cache_dir.set_numba_cache_dir()
    cache_dir.set_triton_cache_dir()
    first = os.environ["NUMBA_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"]
    cache_dir.set_numba_cache_dir()
    cache_dir.set_triton_cache_dir()
    assert first == (os.environ["NUMBA_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"])
    assert tmp_path / "numba" == Path(first[0]).parent
    assert Path(first[0]).is_dir()
    assert str(tmp_path / "triton") == first[1]


def test_a_file_in_the_way(
    tmp_path: Path, variables: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A private temporary folder takes the place, and the log says in one line that kernels are
    compiled at each start."""
    (tmp_path / "numba").write_text("")
    cache_dir.set_numba_cache_dir()
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    assert tmp_path == folder.parent
    assert folder.name.startswith("expertmesh-kernels-")
    (line,) = caplog.messages
    assert line.startswith(f"compiled kernels cannot be kept in {tmp_path / 'numba'}")
    assert line.endswith(": Not a directory; all are compiled at each start")


def test_a_warm_cache_that_cannot_be_written_is_used(
    tmp_path: Path, variables: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in an image with a read-only file system: what is there is copied."""
    cache_dir.set_numba_cache_dir()
    kept = Path(os.environ["NUMBA_CACHE_DIR"])
    (kept / "sub").mkdir()
    (kept / "sub" / "kernel.nbi").write_text("compiled")
    variables.setattr(cache_dir, "_why_not_writable", lambda folder: "Read-only file system")
    caplog.clear()
    cache_dir.set_numba_cache_dir()
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    assert folder != kept
    assert (folder / "sub" / "kernel.nbi").read_text() == "compiled"
    (line,) = caplog.messages
    assert line == (
        f"compiled kernels cannot be kept in {kept}: Read-only file system; "
        "what is missing there is compiled at each start"
    )


def test_nowhere_at_all(
    tmp_path: Path, variables: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without any folder that can be written, kernels work all the same."""

    def fail(**_: object) -> str:
        raise FileNotFoundError("no usable temporary directory")

    (tmp_path / "numba").write_text("")
    variables.setattr(cache_dir.tempfile, "mkdtemp", fail)
    cache_dir.set_numba_cache_dir()
    assert len(caplog.messages) == 1
    found: dict[str, Callable[[int], int]] = {}
    exec("def add_one(x): return x + 1", found)  # without a file, Numba has no folder for it either
    assert jit.njit(found["add_one"])(2) == 3
