"""Where the weights of a model are in its files: as they are, or as codes with scales.

Families name weights as unquantised files do (`...q_proj.weight` and its shape). A `WeightStorage`
says which tensors of the files hold such a weight, takes them, and decodes them when they are
read. Whatever no weight takes is left over, and refused by the inventory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Never, Protocol

import numpy as np
import numpy.typing as npt

from expertmesh.errors import CheckpointError
from expertmesh.host_tensor import Array
from expertmesh.model_config import DtypeName
from expertmesh.safetensors_file import (
    DTYPE_NAMES,
    STORAGE,
    Extent,
    SafetensorsFile,
    TensorHeader,
)

Shape = tuple[int, ...]
OnBytes = Callable[[npt.NDArray[np.uint8]], None]
"""Told of the bytes of each tensor, or entry of one, as they are read from its file."""


def unheard(data: npt.NDArray[np.uint8]) -> None:
    """Nobody wants to know."""


class StoredWeight(Protocol):
    """A weight, found in the files and checked. Its data is read on demand, as often as wanted.

    An index is an entry along the first axis: one expert of a stacked weight.
    """

    @property
    def name(self) -> str:
        """Tensor to be named in messages."""
        ...

    @property
    def path(self) -> Path:
        """File to be named in messages."""
        ...

    @property
    def shape(self) -> Shape:
        """Of the weight, however it is stored."""
        ...

    @property
    def dtype(self) -> DtypeName:
        """Type of what `read` gives."""
        ...

    def nbytes(self, index: int | None = None) -> int:
        """Bytes in the files, of all tensors that hold the weight or one entry of it."""
        ...

    def read(
        self, index: int | None = None, out: Array | None = None, on_bytes: OnBytes = unheard
    ) -> Array:
        """The weight or one entry of it; reads the bytes of no other entry.

        Args:
            index: Entry along the first axis; None for all.
            out: Contiguous place for the result, in the storage form of `dtype`; without it the
                result is a new array, of any strides.
            on_bytes: Told of the tensors that hold it, each once, in an order that is always the
                same.

        Returns:
            `out`, or the new array; owned by the caller.

        Raises:
            CheckpointError: a file was truncated meanwhile, or holds codes that stand for nothing.
        """
        ...


@dataclass(frozen=True)
class Weight:
    """A weight that the model has, before it is known how it is stored."""

    name: str
    """As in unquantised files."""
    shape: Shape
    parameter: str
    """The parameter that it is part of, without its layer: `qkv`, `experts.gate_up`, `gate`."""


class WeightStorage(Protocol):
    """How the files of a checkpoint hold weights."""

    def holds(self, weight: Weight, files: TensorFiles) -> bool:
        """Whether the files hold the weight, and it was not taken yet."""
        ...

    def take(self, weight: Weight, files: TensorFiles) -> StoredWeight:
        """Takes the tensors of a weight that is held.

        Raises:
            CheckpointError: one of them is missing, or has another shape or type than expected;
                names it.
        """
        ...


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file."""

    file: SafetensorsFile
    name: str

    @property
    def path(self) -> Path:
        """Its file."""
        return self.file.path

    @property
    def header(self) -> TensorHeader:
        """Shape, type and place."""
        return self.file.tensors[self.name]

    def extent(self, index: int | None = None) -> Extent:
        """Its bytes, or those of one entry along the first axis."""
        return self.file.extent(self.name, index)

    def read(
        self,
        dtype: np.dtype[np.generic],
        index: int | None = None,
        out: Array | None = None,
        on_bytes: OnBytes = unheard,
    ) -> Array:
        """Its data, or one entry along the first axis, as numpy elements of this type.

        Args:
            dtype: Of as many bytes as the stored type.
            index: Entry along the first axis; None for all.
            out: Contiguous place for the result; a new array without it.
            on_bytes: Told of the bytes.
        """
        shape = self.header.shape if index is None else self.header.shape[1:]
        data = np.empty(shape, dtype) if out is None else out
        stored = data.reshape(-1).view(np.uint8)
        self.file.fill(self.extent(index), stored.data)
        on_bytes(stored)
        return data

    def fail(self, expected: str, found: object) -> Never:
        """Reports that the tensor is not what it has to be."""
        raise CheckpointError(
            f"{self.path}: tensor {self.name}: expected {expected}, found {found}",
            fix="check that config.json belongs to these files",
        )


class TensorFiles:
    """The tensors of a checkpoint by name; each can be taken once.

    Args:
        files: Tensor name to the file that holds it.
    """

    def __init__(self, files: Mapping[str, SafetensorsFile]) -> None:
        self._left = dict(files)
        self.folder = next(iter(files.values())).path.parent if files else Path()

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def find(self, name: str) -> FileTensor | None:
        """A tensor that was not taken yet, to look at; None if there is none."""
        file = self._left.get(name)
        return None if file is None else FileTensor(file, name)

    def left(self) -> dict[str, SafetensorsFile]:
        """What was not taken."""
        return dict(self._left)

    def take(
        self, name: str, shape: Shape, codes: tuple[str, ...] = tuple(DTYPE_NAMES)
    ) -> FileTensor:
        """A tensor of this shape and one of these types.

        Raises:
            CheckpointError: it is not there any more, or is different.
        """
        if name not in self._left:
            raise missing(self.folder, (name,))
        tensor = FileTensor(self._left.pop(name), name)
        if tensor.header.shape != shape:
            tensor.fail(f"shape {list(shape)}", list(tensor.header.shape))
        if tensor.header.dtype_code not in codes:
            tensor.fail(f"type {' or '.join(codes)}", tensor.header.dtype_code)
        return tensor


def missing(folder: Path, names: tuple[str, ...], fix: str = "") -> CheckpointError:
    """The error for a tensor that none of the files has."""
    return CheckpointError(
        f"{folder}: tensor {' or '.join(names)}: expected once, found nowhere",
        fix=fix
        or "check that the download is complete and that config.json belongs to these files",
    )


@dataclass(frozen=True)
class PlainWeight:
    """A weight stored as it is. A `StoredWeight`."""

    tensor: FileTensor

    @property
    def name(self) -> str:
        """Name of the tensor."""
        return self.tensor.name

    @property
    def path(self) -> Path:
        """File of the tensor."""
        return self.tensor.path

    @property
    def shape(self) -> Shape:
        """Shape of the tensor."""
        return self.tensor.header.shape

    @property
    def dtype(self) -> DtypeName:
        """Type of the tensor."""
        return DTYPE_NAMES[self.tensor.header.dtype_code]

    def nbytes(self, index: int | None = None) -> int:
        """Bytes of the tensor or of one entry."""
        return self.tensor.extent(index).nbytes

    def read(
        self, index: int | None = None, out: Array | None = None, on_bytes: OnBytes = unheard
    ) -> Array:
        """The tensor or one entry."""
        return self.tensor.read(STORAGE[self.dtype], index, out, on_bytes)


class PlainStorage:
    """Every weight is a tensor of its name. A `WeightStorage`."""

    def holds(self, weight: Weight, files: TensorFiles) -> bool:
        """Whether there is such a tensor."""
        return weight.name in files

    def take(self, weight: Weight, files: TensorFiles) -> StoredWeight:
        """The tensor."""
        return PlainWeight(files.take(weight.name, weight.shape))


PLAIN: WeightStorage = PlainStorage()
