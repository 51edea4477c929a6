"""Which safetensors files make up a checkpoint, and which tensor lies in which."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from expertmesh.errors import CheckpointError
from expertmesh.json_file import read_json_object
from expertmesh.safetensors_file import CONVERT, ReadInto, SafetensorsFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MAX_SHARDS = 4096


def open_shards(model_dir: Path, read_into: ReadInto) -> dict[str, SafetensorsFile]:
    """Tensor name to the file that holds it.

    Raises:
        CheckpointError: files are missing, doubled, outside the folder, or do not hold exactly
            what the index says.
    """
    single, index = model_dir / SINGLE_FILE, model_dir / INDEX_FILE
    if single.exists() and index.exists():
        raise CheckpointError(
            f"{model_dir}: holds both {SINGLE_FILE} and {INDEX_FILE}",
            fix="remove the one that is left over",
        )
    if index.exists():
        return _open_indexed(model_dir, index, read_into)
    if not single.exists():
        raise _nothing_found(model_dir)
    return _collect([SafetensorsFile(_inside(model_dir, SINGLE_FILE, model_dir), read_into)])


def _open_indexed(model_dir: Path, index: Path, read_into: ReadInto) -> dict[str, SafetensorsFile]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map: expected tensor names to file names")
    for name in weight_map.values():
        if not isinstance(name, str):
            raise CheckpointError(f"{index}: file {name!r}: expected a file name")
    names = list(dict.fromkeys(weight_map.values()))
    if len(names) > MAX_SHARDS:
        raise CheckpointError(f"{index}: {len(names)} files, expected at most {MAX_SHARDS}")
    paths = {name: _inside(model_dir, name, index) for name in names}
    if len(set(paths.values())) < len(paths):
        raise CheckpointError(f"{index}: two of its file names lead to the same file")
    files = {name: SafetensorsFile(path, read_into) for name, path in paths.items()}
    found = _collect(files.values())
    for tensor, name in weight_map.items():
        if found.get(tensor) is not files[name]:
            raise CheckpointError(
                f"{index}: tensor {tensor}: expected in {name}, found "
                f"{found[tensor].path.name if tensor in found else 'nowhere'}",
                fix="download the checkpoint again",
            )
    for tensor in found.keys() - weight_map.keys():
        raise CheckpointError(f"{found[tensor].path}: tensor {tensor}: not in {INDEX_FILE}")
    return found


def _collect(files: Iterable[SafetensorsFile]) -> dict[str, SafetensorsFile]:
    found: dict[str, SafetensorsFile] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor in found:
                raise CheckpointError(
                    f"{file.path}: tensor {tensor}: expected once, found in "
                    f"{found[tensor].path.name} too"
                )
            found[tensor] = file
    return found


def _inside(model_dir: Path, name: str, source: Path) -> Path:
    """The real path of a file of the folder.

    Links are followed within the folder, and from a snapshot of the Hugging Face cache to its
    blobs (`<repo>/snapshots/<revision>/x` points to `<repo>/blobs/<hash>`).
    """
    if not name.endswith(".safetensors") or not _is_plain(name):
        raise CheckpointError(f"{source}: file {name!r}: expected the name of a .safetensors file")
    folder = model_dir.resolve()
    try:
        real = (folder / name).resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise CheckpointError(f"{source}: file {name!r}: {error}") from error
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed.append(folder.parent.parent / "blobs")
    if not any(real.is_relative_to(root) for root in allowed):
        raise CheckpointError(f"{source}: file {name!r}: leads outside the folder, to {real}")
    if not real.exists():
        raise CheckpointError(
            f"{folder / name}: missing, but named by {source.name}",
            fix="download the checkpoint again",
        )
    return real


def _is_plain(name: str) -> bool:
    return not any(character in name for character in "/\\\0") and len(name) < 256


def _nothing_found(model_dir: Path) -> CheckpointError:
    pickles = sorted(p.name for p in model_dir.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        return CheckpointError(
            f"{model_dir}: expected {SINGLE_FILE}, found only pickles ({pickles[0]})", fix=CONVERT
        )
    return CheckpointError(
        f"{model_dir}: expected {SINGLE_FILE} or {INDEX_FILE}, found neither",
        fix="check that the download is complete",
    )
