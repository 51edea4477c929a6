"""Writes a model folder so that it is complete or not there.

Everything is written to `<folder>.partial`, file by file, each synced and listed with its checksum
in `manifest.json`; at the end the folder gets its name in one step. After an interruption the next
run goes on at the first file that is not listed. A lock keeps a second process waiting.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from expertmesh.errors import CheckpointError, SettingsError, StartupError
from expertmesh.file_lock import exclusive, sync_folder, write_atomically
from expertmesh.json_file import read_json_object
from expertmesh.model_config import DtypeName
from expertmesh.model_tools.config_json import encode
from expertmesh.model_tools.progress import Progress
from expertmesh.model_tools.upcycling import OutputTensor
from expertmesh.safetensors_file import DTYPE_NAMES, STORAGE
from expertmesh.shards import INDEX_FILE, SINGLE_FILE

SHARD_BYTES = 288 << 20
"""Also how much work an interruption can cost."""
MANIFEST_FILE = "manifest.json"
_DTYPE_CODES = {name: code for code, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class ModelContents:
    """What a model folder is to hold."""

    tensors: list[OutputTensor]
    dtype: DtypeName
    files: dict[str, bytes] = field(default_factory=dict)
    """Small files by name, config.json among them."""


Recipe = dict[str, object]
"""JSON that tells what a folder is made from; a folder of another recipe is not resumed."""

OpenContents = Callable[[Path], AbstractContextManager[ModelContents]]
"""Opens the source; is given a folder for scratch files. Called only if there is work."""


def write_model_folder(
    folder: Path,
    recipe: Recipe,
    open_contents: OpenContents,
    progress: Progress,
    *,
    replace_existing: bool,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Makes `folder` unless it is there already, made by the same recipe.

    Args:
        folder: Where the model goes.
        recipe: What it is made from.
        open_contents: Gives the contents.
        progress: Is told the bytes written.
        replace_existing: Whether a folder of another recipe may be replaced.
        shard_bytes: Most bytes of a safetensors file, unless a single tensor is larger.

    Raises:
        SettingsError: the folder holds something else and may not be replaced.
        StartupError: no room on the disk, or another process holds the lock for too long.
    """
    with exclusive(folder.with_name(f".{folder.name}.lock")):
        if is_complete(folder, recipe):
            return
        if folder.exists() and not replace_existing:
            raise SettingsError(
                f"{folder}: exists, and is not what this command would write",
                fix="remove it or choose another folder",
            )
        partial = _Partial(folder.with_name(folder.name + ".partial"), recipe, progress)
        scratch = partial.folder / "scratch"
        scratch.mkdir()
        with open_contents(scratch) as contents:
            partial.write(contents, shard_bytes)
        shutil.rmtree(scratch)
        _publish(partial.folder, folder)
        progress.done()


def is_complete(folder: Path, recipe: Recipe) -> bool:
    """Whether a folder was made by this recipe and its files still have their sizes."""
    manifest = _read_manifest(folder)
    if manifest is None or manifest.recipe != recipe:
        return False
    return all(_size(folder / name) == entry.size for name, entry in manifest.files.items())


@dataclass(frozen=True)
class _FileEntry:
    size: int
    sha256: str


@dataclass(frozen=True)
class _Manifest:
    recipe: Recipe
    files: dict[str, _FileEntry] = field(default_factory=dict)


class _Partial:
    """The unfinished folder. Keeps what an earlier run finished with the same recipe."""

    def __init__(self, folder: Path, recipe: Recipe, progress: Progress) -> None:
        self.folder = folder
        self._progress = progress
        manifest = _read_manifest(folder)
        if manifest is None or manifest.recipe != recipe:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            manifest = _Manifest(recipe)
        self._manifest = manifest
        self._remove_leftovers()
        self._save_manifest()

    def write(self, contents: ModelContents, shard_bytes: int) -> None:
        """Writes all files that are not there yet."""
        item = STORAGE[contents.dtype].itemsize
        shards = _split(contents.tensors, item, shard_bytes)
        sizes = [sum(_count(t) * item for t in shard) for shard in shards]
        names = _shard_names(len(shards))
        missing = sum(size for name, size in zip(names, sizes, strict=True) if not self._has(name))
        _check_room(self.folder, missing)
        self._progress.stage(f"writing {self.folder.stem}", sum(sizes))
        for name, size, shard in zip(names, sizes, shards, strict=True):
            if self._has(name):
                self._progress.advance(size)
            else:
                self._write_shard(name, shard, contents.dtype)
        for name, data in (contents.files | _index(names, shards, sum(sizes))).items():
            write_atomically(self.folder / name, data)
            self._record(name, _FileEntry(len(data), hashlib.sha256(data).hexdigest()))

    def _write_shard(self, name: str, shard: list[OutputTensor], dtype: DtypeName) -> None:
        path = self.folder / name
        temporary = path.with_name(name + ".tmp")
        digest = hashlib.sha256()
        with temporary.open("wb") as file:
            for data in _safetensors(shard, dtype):
                file.write(data)
                digest.update(data)
                self._progress.advance(len(data))
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        os.replace(temporary, path)
        self._record(name, _FileEntry(size, digest.hexdigest()))

    def _record(self, name: str, entry: _FileEntry) -> None:
        self._manifest.files[name] = entry
        self._save_manifest()

    def _save_manifest(self) -> None:
        files = {
            name: {"size": entry.size, "sha256": entry.sha256}
            for name, entry in self._manifest.files.items()
        }
        data = encode({"recipe": self._manifest.recipe, "files": files})
        write_atomically(self.folder / MANIFEST_FILE, data)

    def _has(self, name: str) -> bool:
        return name in self._manifest.files

    def _remove_leftovers(self) -> None:
        """Removes what is not listed, or is listed and damaged."""
        for path in self.folder.iterdir():
            entry = self._manifest.files.get(path.name)
            if path.is_dir():
                shutil.rmtree(path)
            elif entry is not None and _sha256(path) == entry.sha256:
                continue
            elif path.name != MANIFEST_FILE:
                path.unlink()
        for name in list(self._manifest.files):
            if not (self.folder / name).exists():
                del self._manifest.files[name]


def _read_manifest(folder: Path) -> _Manifest | None:
    """The manifest of a folder, or None if there is none that can be used."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return None
    try:
        raw = read_json_object(path)
        recipe, files = raw["recipe"], raw["files"]
        if not (isinstance(recipe, dict) and isinstance(files, dict)):
            return None
        entries = {name: _FileEntry(**entry) for name, entry in files.items()}
    except (CheckpointError, KeyError, TypeError):
        return None
    return _Manifest(recipe, entries)


def _safetensors(shard: list[OutputTensor], dtype: DtypeName) -> Iterable[bytes | memoryview]:
    """The bytes of a safetensors file: length of the header, header, tensors."""
    item = STORAGE[dtype].itemsize
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in shard:
        end = offset + _count(tensor) * item
        header[tensor.name] = {
            "dtype": _DTYPE_CODES[dtype],
            "shape": tensor.shape,
            "data_offsets": (offset, end),
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns data to 8 bytes
    yield len(text).to_bytes(8, "little") + text
    for tensor in shard:
        data = tensor.make()
        assert data.shape == tensor.shape, f"{tensor.name}: {data.shape} is not {tensor.shape}"
        assert data.dtype == STORAGE[dtype], f"{tensor.name}: {data.dtype}"
        yield data.tobytes()


def _split(tensors: list[OutputTensor], item: int, limit: int) -> list[list[OutputTensor]]:
    shards: list[list[OutputTensor]] = [[]]
    size = 0
    for tensor in tensors:
        nbytes = _count(tensor) * item
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += nbytes
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]


def _index(names: list[str], shards: list[list[OutputTensor]], total: int) -> dict[str, bytes]:
    if len(names) == 1:
        return {}
    weight_map = {
        tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard
    }
    return {INDEX_FILE: encode({"metadata": {"total_size": total}, "weight_map": weight_map})}


def _publish(partial: Path, folder: Path) -> None:
    """Gives the finished folder its name."""
    sync_folder(partial)
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StartupError(
            f"{folder}: {needed >> 20} MiB needed, {free >> 20} MiB free on the disk",
            fix="make room, or set EXPERTMESH_HOME to a folder on another disk",
        )


def _count(tensor: OutputTensor) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return count


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
