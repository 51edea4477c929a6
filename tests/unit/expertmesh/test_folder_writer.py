"""Model folders are complete or not there, whatever interrupts their making."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from expertmesh.errors import SettingsError, StartupError
from expertmesh.file_lock import exclusive, write_atomically
from expertmesh.host_tensor import Array
from expertmesh.model_tools.folder_writer import ModelContents, is_complete, write_model_folder
from expertmesh.model_tools.progress import NoProgress
from expertmesh.model_tools.upcycling import OutputTensor

RECIPE: dict[str, object] = {"tool": "test", "version": 1}
NUM_TENSORS = 6


class Source:
    """Six tensors, two to a file; counts which were made."""

    def __init__(self) -> None:
        self.made: list[int] = []

    @contextmanager
    def open(self, scratch: Path) -> Iterator[ModelContents]:
        """The contents, with a scratch file as a real source would leave."""
        (scratch / "big").write_bytes(b"x")
        tensors = [OutputTensor(f"t{i}", (4, 8), lambda i=i: self._make(i)) for i in range(6)]
        yield ModelContents(tensors, "float32", {"config.json": b"{}"})

    def _make(self, index: int) -> Array:
        self.made.append(index)
        return np.full((4, 8), index, np.float32)


class Interrupted(NoProgress):
    """Raises KeyboardInterrupt at the n-th call, as Ctrl-C would."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def advance(self, count: int) -> None:
        """Counts down."""
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt


def write(folder: Path, source: Source, progress: NoProgress | None = None, **changes: object):
    """Writes the model, two tensors a file."""
    settings: dict[str, object] = {"recipe": RECIPE, "replace_existing": False, "shard_bytes": 256}
    settings |= changes
    recipe = settings.pop("recipe")
    write_model_folder(folder, recipe, source.open, progress or NoProgress(), **settings)


def test_folder_holds_shards_index_and_manifest(tmp_path: Path) -> None:
    """Nothing but the model and its list of checksums is left."""
    folder = tmp_path / "m"
    write(folder, Source())
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    names = ["config.json", "manifest.json", *shards, "model.safetensors.index.json"]
    assert names == sorted(path.name for path in folder.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == [".m.lock", "m"]
    found = load_file(folder / shards[1])
    assert {name: float(data.mean()) for name, data in found.items()} == {"t2": 2.0, "t3": 3.0}
    assert is_complete(folder, RECIPE)


@pytest.mark.parametrize("calls", range(9))
def test_interrupted_run_is_resumed_and_never_looks_finished(tmp_path: Path, calls: int) -> None:
    """After Ctrl-C at any point no folder is there; the next run keeps finished files."""
    folder = tmp_path / "m"
    first = Source()
    with pytest.raises(KeyboardInterrupt):
        write(folder, first, Interrupted(calls))
    assert not folder.exists()
    second = Source()
    write(folder, second)
    finished = calls // 3 * 2  # one call for a header, one a tensor; two tensors a file
    assert list(range(finished, NUM_TENSORS)) == second.made
    assert is_complete(folder, RECIPE)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["m"]


def test_finished_folder_is_left_alone(tmp_path: Path) -> None:
    """A second run makes nothing."""
    write(tmp_path / "m", Source())
    again = Source()
    write(tmp_path / "m", again)
    assert again.made == []


def test_damaged_file_of_an_interrupted_run_is_made_again(tmp_path: Path) -> None:
    """Finished files are believed only if their checksum still fits."""
    folder = tmp_path / "m"
    with pytest.raises(KeyboardInterrupt):
        write(folder, Source(), Interrupted(7))
    path = tmp_path / "m.partial" / "model-00001-of-00003.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    source = Source()
    write(folder, source)
    assert source.made == [0, 1, 4, 5]


def test_other_recipe_starts_afresh(tmp_path: Path) -> None:
    """Files of another recipe are not mixed in."""
    folder = tmp_path / "m"
    with pytest.raises(KeyboardInterrupt):
        write(folder, Source(), Interrupted(7))
    source = Source()
    write(folder, source, recipe={"tool": "test", "version": 2})
    assert list(range(NUM_TENSORS)) == source.made


def test_folder_of_another_recipe_is_replaced_only_if_allowed(tmp_path: Path) -> None:
    """The tool's own cache may be renewed, a user's folder may not."""
    folder = tmp_path / "m"
    write(folder, Source())
    newer: dict[str, object] = {"tool": "test", "version": 2}
    with pytest.raises(SettingsError, match="exists"):
        write(folder, Source(), recipe=newer)
    assert is_complete(folder, RECIPE)
    write(folder, Source(), recipe=newer, replace_existing=True)
    assert is_complete(folder, newer)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["m"]


def test_truncated_file_of_a_finished_folder_is_noticed(tmp_path: Path) -> None:
    """Sizes are compared each time; a shorter file means it has to be made again."""
    folder = tmp_path / "m"
    write(folder, Source())
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert not is_complete(folder, RECIPE)


def test_two_at_once_make_it_once(tmp_path: Path) -> None:
    """The second waits for the first and finds the finished folder."""
    sources = [Source(), Source()]
    threads = [
        threading.Thread(target=write, args=(tmp_path / "m", source), name="writer")
        for source in sources
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert sum(len(source.made) for source in sources) == NUM_TENSORS
    assert is_complete(tmp_path / "m", RECIPE)


def test_lock_held_for_too_long_is_an_error(tmp_path: Path) -> None:
    """Waiting ends with a line that names the lock."""
    lock = tmp_path / "x.lock"
    held = pytest.raises(StartupError, match=r"x\.lock: another process has held")
    with exclusive(lock), held:
        exclusive(lock, timeout_s=0.0).__enter__()
    with exclusive(lock, timeout_s=0.0):
        assert lock.exists()


def test_atomic_write_leaves_no_other_file(tmp_path: Path) -> None:
    """Old content is replaced in one step."""
    write_atomically(tmp_path / "f", b"old")
    write_atomically(tmp_path / "f", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"f": b"new"}
