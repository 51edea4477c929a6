"""A checkpoint on disk, opened strictly and read piece by piece.

Opening reads and verifies headers only. Data is read on demand, each time into new memory that the
caller owns, so that an expert worker holds only its own experts. Safe to use from several threads:
reads are positioned and share no state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from expertmesh.errors import CheckpointError
from expertmesh.families import FAMILIES, load_model_config
from expertmesh.inventory import Inventory, ParameterSource, take_inventory
from expertmesh.model_config import DtypeName, ModelConfig
from expertmesh.safetensors_file import (
    Extent,
    ReadInto,
    SafetensorsFile,
    pread_into,
    read_extents,
)
from expertmesh.shards import open_shards
from expertmesh.tokenizer_files import read_chat_template, read_special_tokens

FINGERPRINT_BYTES = 32
_SAMPLE_BYTES = 256
_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class HostTensor:
    """A tensor in host memory, writable and owned by whoever holds it."""

    data: npt.NDArray[np.generic]
    """bfloat16 is held as its bits in uint16, other types as themselves."""
    dtype: DtypeName

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return self.data.shape

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.data.nbytes


@dataclass(frozen=True)
class ExpertTensors:
    """One expert's weights."""

    gate_up: HostTensor
    """[2I, H], gate rows first."""
    down: HostTensor
    """[H, I]"""

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.gate_up.nbytes + self.down.nbytes


class Checkpoint:
    """An open model folder. Made by `Checkpoint.open`.

    Attributes:
        model_dir: The folder.
        config: What the model is.
        fingerprint: 32 bytes that differ if config, tensor shapes or (by samples) weights differ;
            the same for one model in shards or in a single file.
    """

    def __init__(
        self,
        model_dir: Path,
        config: ModelConfig,
        files: dict[str, SafetensorsFile],
        inventory: Inventory,
    ) -> None:
        self.model_dir = model_dir
        self.config = config
        self._files = files
        self._inventory = inventory
        self.fingerprint = _fingerprint(config, files)

    @classmethod
    def open(cls, model_dir: Path, *, read_into: ReadInto = pread_into) -> Checkpoint:
        """Opens a folder and checks that it holds exactly what its family needs.

        Args:
            model_dir: Folder with config.json and safetensors files.
            read_into: Reads bytes of a file; replaced in tests to count them.

        Raises:
            CheckpointError: one line naming file, tensor, what was expected and what was found.
        """
        config = load_model_config(model_dir)
        files = open_shards(model_dir, read_into)
        inventory = take_inventory(config, FAMILIES[config.family], files)
        return cls(model_dir, config, files, inventory)

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.model_dir.resolve().name

    @property
    def tokenizer_path(self) -> Path | None:
        """`tokenizer.json`, or None if the model has no tokenizer."""
        path = self.model_dir / "tokenizer.json"
        return path if path.is_file() else None

    def chat_template(self) -> str | None:
        """Source of the chat template, or None."""
        return read_chat_template(self.model_dir)

    def special_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token` and others by the names that chat templates use."""
        return read_special_tokens(self.model_dir)

    def attention_parameters(self) -> Iterator[tuple[str, HostTensor]]:
        """Everything outside the experts, one at a time, in the order of the forward pass."""
        for name, source in self._inventory.parameters.items():
            tensor = self._read(source)
            if name == "embed" and self._inventory.tied_copy is not None:
                self._check_tied(tensor, self._inventory.tied_copy)
            yield name, tensor

    def attention_nbytes(self) -> int:
        """Bytes of all attention parameters as stored."""
        sources = self._inventory.parameters.values()
        return sum(extent.nbytes for source in sources for extent in source.extents)

    def read_expert(self, layer: int, expert: int) -> ExpertTensors:
        """One expert's weights; reads only its bytes, from stacked tensors too.

        Raises:
            CheckpointError: the file was truncated meanwhile, or holds NaN or infinity.
            KeyError: the model has no such expert.
        """
        source = self._inventory.experts[layer, expert]
        return ExpertTensors(self._read(source.gate_up), self._read(source.down))

    def stored_tensor(self, name: str) -> HostTensor:
        """A tensor by its name in the files, as stored."""
        file = self._files[name]
        return self._read(ParameterSource((file.extent(name),), file.tensors[name].shape))

    def expert_nbytes(self) -> int:
        """Bytes of one expert as stored (the largest, if layers differ); 0 without experts."""
        sizes = (
            sum(extent.nbytes for extent in (*source.gate_up.extents, *source.down.extents))
            for source in self._inventory.experts.values()
        )
        return max(sizes, default=0)

    def close(self) -> None:
        """Closes the files; nothing can be read afterwards."""
        for file in set(self._files.values()):
            file.close()

    def _read(self, source: ParameterSource) -> HostTensor:
        dtype = self.config.dtype
        data = read_extents(source.extents, source.shape, dtype)
        if not _is_finite(data, dtype):
            extent = source.extents[0]
            raise CheckpointError(
                f"{extent.file.path}: tensor {extent.tensor}: holds NaN or infinity, expected "
                "finite weights",
                fix="download the file again",
            )
        return HostTensor(data, dtype)

    def _check_tied(self, embed: HostTensor, copy: ParameterSource) -> None:
        (extent,) = copy.extents
        flat = embed.data.reshape(-1).view(np.uint8).data
        step = _CHUNK_ELEMENTS
        for start in range(0, extent.nbytes, step):
            length = min(step, extent.nbytes - start)
            part = Extent(extent.file, extent.tensor, extent.offset + start, length)
            if extent.file.read(part) != bytes(flat[start : start + length]):
                raise CheckpointError(
                    f"{extent.file.path}: tensor {extent.tensor}: differs from the embedding, "
                    "expected equal as tie_word_embeddings is true",
                    fix='set "tie_word_embeddings": false in config.json',
                )


def _is_finite(data: npt.NDArray[np.generic], dtype: DtypeName) -> bool:
    """Whether all elements are finite, in pieces so that temporaries stay small."""
    flat = data.reshape(-1)
    for start in range(0, flat.size, _CHUNK_ELEMENTS):
        part = flat[start : start + _CHUNK_ELEMENTS]
        if dtype == "bfloat16":
            bits = part.view(np.uint16) & 0x7FFF
            if bits.max() >= 0x7F80:  # exponent of all ones
                return False
        elif not np.isfinite(part.view(np.dtype(dtype))).all():
            return False
    return True


def _fingerprint(config: ModelConfig, files: dict[str, SafetensorsFile]) -> bytes:
    digest = hashlib.blake2b(repr(config).encode(), digest_size=FINGERPRINT_BYTES)
    for name in sorted(files):
        file = files[name]
        header = file.tensors[name]
        digest.update(f"\n{name} {header.dtype_code} {header.shape}\n".encode())
        length = min(_SAMPLE_BYTES, header.nbytes)
        for start in (header.offset, header.offset + header.nbytes - length):
            digest.update(file.read(Extent(file, name, start, length)))
    return digest.digest()
