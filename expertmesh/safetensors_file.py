"""Safetensors files: verified headers, exact reads.

The `safetensors` library verifies the header; data is then read with `preadv` into memory of our
own. Files are never mapped for data: a mapped file that is truncated in place kills the process
with SIGBUS, a short read is an error that can be named.
"""

from __future__ import annotations

import json
import os
import stat
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from expertmesh.errors import CheckpointError
from expertmesh.model_config import DtypeName

ReadInto = Callable[[int, memoryview, int], int]
"""(file descriptor, buffer, offset) to bytes read; 0 at the end of the file."""

DTYPE_NAMES: Mapping[str, DtypeName] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Type codes of the format that weights may have."""

STORAGE: Mapping[DtypeName, np.dtype[np.generic]] = {
    "float32": np.dtype("<f4"),
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
}
"""How a type is held in numpy; bfloat16 has none there, so its bits are kept in uint16."""

_LENGTH_BYTES = 8
_PICKLE_MAGIC = (b"PK\x03\x04", b"\x80\x02", b"\x80\x04", b"\x80\x05")
"""Zip archives (PyTorch's format) and bare pickles; read as a length, these would be absurd."""

CONVERT = "convert it: transformers' save_pretrained(..., safe_serialization=True)"
"""Advice for checkpoints that hold pickles only."""


@dataclass(frozen=True)
class TensorHeader:
    """Where a tensor lies in its file."""

    name: str
    dtype_code: str
    """Type code of the format, e.g. BF16."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


@dataclass(frozen=True)
class Extent:
    """A range of bytes of one file."""

    file: SafetensorsFile
    tensor: str
    offset: int
    nbytes: int


def pread_into(descriptor: int, buffer: memoryview, offset: int) -> int:
    """The default `ReadInto`: one positioned read."""
    return os.preadv(descriptor, [buffer], offset)


class SafetensorsFile:
    """One open file. It keeps its inode, so a file renamed over it changes nothing.

    Args:
        path: A regular file.
        read_into: Reads bytes; replaced in tests to count them.

    Raises:
        CheckpointError: the file is unreadable or not a complete, valid safetensors file.
    """

    def __init__(self, path: Path, read_into: ReadInto = pread_into) -> None:
        self.path = path
        self._read_into = read_into
        self._descriptor = _open_regular(path)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size
        _verify(path, self._start(_LENGTH_BYTES), self.size)
        self.tensors = self._read_header()

    def close(self) -> None:
        """Closes the file; safe to call twice."""
        self._close()

    def extent(self, name: str, index: int | None = None) -> Extent:
        """The bytes of a tensor, or of one entry along its first axis."""
        header = self.tensors[name]
        if index is None:
            return Extent(self, name, header.offset, header.nbytes)
        nbytes = header.nbytes // header.shape[0]
        return Extent(self, name, header.offset + index * nbytes, nbytes)

    def fill(self, extent: Extent, buffer: memoryview) -> None:
        """Reads an extent into a buffer of its size."""
        done = 0
        while done < extent.nbytes:
            count = self._read_into(self._descriptor, buffer[done:], extent.offset + done)
            if count == 0:
                raise CheckpointError(
                    f"{self.path}: tensor {extent.tensor}: file ends at byte "
                    f"{extent.offset + done}, expected {extent.nbytes - done} bytes more",
                    fix="the file was truncated: download it again",
                )
            done += count

    def read(self, extent: Extent) -> bytes:
        """The bytes of an extent."""
        data = bytearray(extent.nbytes)
        self.fill(extent, memoryview(data))
        return bytes(data)

    def _start(self, length: int) -> bytes:
        return os.pread(self._descriptor, length, 0)

    def _read_header(self) -> dict[str, TensorHeader]:
        length = int.from_bytes(self._start(_LENGTH_BYTES), "little")
        start = _LENGTH_BYTES + length
        raw = json.loads(os.pread(self._descriptor, length, _LENGTH_BYTES))
        raw.pop("__metadata__", None)
        found = {}
        for name, entry in raw.items():
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            found[name] = TensorHeader(name, entry["dtype"], shape, start + begin, end - begin)
            if start + end > self.size:
                raise CheckpointError(f"{self.path}: tensor {name}: lies beyond the end of file")
        return found


def _open_regular(path: Path) -> int:
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror or error}", fix="check that the download is complete"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: expected a regular file")
    return descriptor


def _verify(path: Path, start: bytes, size: int) -> None:
    if start.startswith(_PICKLE_MAGIC) and int.from_bytes(start, "little") > size:
        raise CheckpointError(f"{path}: expected safetensors, found a pickle", fix=CONVERT)
    try:
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not a complete safetensors file: {error}", fix="download the file again"
        ) from error
