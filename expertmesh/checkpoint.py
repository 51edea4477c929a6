"""A checkpoint on disk, opened strictly and read piece by piece.

Opening reads and verifies headers only. Data is read on demand, each time into new memory that the
caller owns, so that an expert worker holds only its own experts. Safe to use from several threads:
reads are positioned and share no state.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from expertmesh.errors import CheckpointError
from expertmesh.families import FAMILIES, load_model_config
from expertmesh.formats import Quantization, QuantizedStorage, read_quantization
from expertmesh.formats.coded import CodedMatrix
from expertmesh.formats.keep import Coding
from expertmesh.formats.storage import QuantizedWeight
from expertmesh.host_tensor import HostTensor, common_dtype, widen
from expertmesh.inventory import Inventory, take_inventory
from expertmesh.model_config import ModelConfig
from expertmesh.parameter_source import ParameterSource
from expertmesh.safetensors_file import DTYPE_NAMES, Extent, ReadInto, SafetensorsFile, pread_into
from expertmesh.shards import open_shards
from expertmesh.tokenizer_files import read_chat_template, read_special_tokens
from expertmesh.weight_storage import FileTensor, OnBytes, PlainWeight, unheard

__all__ = ["FINGERPRINT_BYTES", "Checkpoint", "CodedExpert", "ExpertTensors", "HostTensor"]

FINGERPRINT_BYTES = 32
_SAMPLE_BYTES = 256


@dataclass(frozen=True)
class ExpertTensors:
    """One expert's weights."""

    gate_up: HostTensor
    """[2I, H], gate rows first."""
    down: HostTensor
    """[H, I]"""
    gate_up_bias: HostTensor | None = None
    """[2I]"""
    down_bias: HostTensor | None = None
    """[H]"""

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        parts = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True)
class CodedExpert:
    """One expert's weights, not decoded; shapes as in `ExpertTensors`."""

    gate_up: CodedMatrix
    down: CodedMatrix
    gate_up_bias: HostTensor | None = None
    down_bias: HostTensor | None = None


class Checkpoint:
    """An open model folder. Made by `Checkpoint.open`.

    Attributes:
        model_dir: The folder.
        config: What the model is.
        quantization: How `config.json` says that weights are stored.
        fingerprint: 32 bytes that differ if config, tensor shapes or (by samples) weights differ;
            the same for one model in shards or in a single file.
    """

    def __init__(
        self,
        model_dir: Path,
        config: ModelConfig,
        files: dict[str, SafetensorsFile],
        inventory: Inventory,
        quantization: Quantization,
    ) -> None:
        self.model_dir = model_dir
        self.config = config
        self._files = files
        self._inventory = inventory
        self.quantization = quantization
        self.fingerprint = _fingerprint(f"{config!r} {quantization!r}", files)

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
        quantization = read_quantization(model_dir / "config.json")
        storage = QuantizedStorage(quantization)
        inventory = take_inventory(config, FAMILIES[config.family], storage, files)
        config = load_model_config(model_dir, inventory.parameters["embed"].dtype)
        return cls(model_dir, config, files, inventory, quantization)

    @property
    def name(self) -> str:
        """Name of the model by its folder."""
        return name_of_folder(self.model_dir.resolve())

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

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Everything outside the experts, in the order of the forward pass."""
        return tuple(self._inventory.parameters)

    def read_parameter(self, name: str) -> HostTensor:
        """A parameter outside the experts.

        Raises:
            CheckpointError: the file was truncated meanwhile, holds NaN or infinity, or has an
                output that is not the embedding though they are tied.
            KeyError: the model has no such parameter.
        """
        tensor = self._inventory.parameters[name].read()
        if name == "embed" and self._inventory.tied_copy is not None:
            _check_tied(tensor, self._inventory.tied_copy)
        return tensor

    def attention_nbytes(self) -> int:
        """Bytes of all attention parameters as stored."""
        return sum(source.nbytes for source in self._inventory.parameters.values())

    def read_expert(self, layer: int, expert: int, on_bytes: OnBytes = unheard) -> ExpertTensors:
        """One expert's weights; reads only its bytes, from stacked tensors too.

        Args:
            layer: Of the model.
            expert: Of the layer.
            on_bytes: Told of what is read, always in the same order.

        Raises:
            CheckpointError: the file was truncated meanwhile, or holds NaN or infinity.
            KeyError: the model has no such expert.
        """
        source = self._inventory.experts[layer, expert]
        return ExpertTensors(
            source.gate_up.read(on_bytes),
            source.down.read(on_bytes),
            _read_optional(source.gate_up_bias, on_bytes),
            _read_optional(source.down_bias, on_bytes),
        )

    def expert_formats(self) -> tuple[str, ...]:
        """Names of the quantised formats in which experts are stored; none if they are plain."""
        sources = (s for e in self._inventory.experts.values() for s in (e.gate_up, e.down))
        weights = (weight for source in sources for weight in source.weights)
        names = {w.codec.name for w in weights if isinstance(w, QuantizedWeight)}
        return tuple(sorted(names))

    def expert_coding(self, layer: int) -> Coding | None:
        """How kernels take a layer's experts as they are stored; None if none does."""
        found = {
            part.coding
            for (of_layer, _), expert in self._inventory.experts.items()
            if of_layer == layer
            for part in (expert.gate_up, expert.down)
        }
        return found.pop() if len(found) == 1 else None

    def read_coded_expert(
        self, layer: int, expert: int, on_bytes: OnBytes = unheard
    ) -> CodedExpert:
        """One expert's weights as they are stored; its layer has a coding.

        Args:
            layer: Of the model.
            expert: Of the layer.
            on_bytes: Told of what is read, in the same order as by `read_expert`.

        Raises:
            CheckpointError: As for `read_expert`.
            KeyError: the model has no such expert.
        """
        source = self._inventory.experts[layer, expert]
        return CodedExpert(
            source.gate_up.read_coded(on_bytes),
            source.down.read_coded(on_bytes),
            _read_optional(source.gate_up_bias, on_bytes),
            _read_optional(source.down_bias, on_bytes),
        )

    def stored_tensor(self, name: str) -> HostTensor:
        """A tensor by its name in the files, as stored.

        Raises:
            CheckpointError: its type is none that weights have, or it holds NaN or infinity.
        """
        tensor = FileTensor(self._files[name], name)
        if tensor.header.dtype_code not in DTYPE_NAMES:
            tensor.fail(f"type {' or '.join(DTYPE_NAMES)}", tensor.header.dtype_code)
        return ParameterSource((PlainWeight(tensor),), tensor.header.shape).read()

    def expert_nbytes(self) -> int:
        """Bytes of one expert as stored (the largest, if layers differ); 0 without experts."""
        return max((source.nbytes for source in self._inventory.experts.values()), default=0)

    def close(self) -> None:
        """Closes the files; nothing can be read afterwards."""
        for file in set(self._files.values()):
            file.close()


def _read_optional(source: ParameterSource | None, on_bytes: OnBytes) -> HostTensor | None:
    return None if source is None else source.read(on_bytes)


def _check_tied(embed: HostTensor, source: ParameterSource) -> None:
    copy = source.read()
    dtype = common_dtype((embed.dtype, copy.dtype))
    found = widen(copy.data, copy.dtype, dtype)
    if not np.array_equal(widen(embed.data, embed.dtype, dtype), found):
        (weight,) = source.weights
        raise CheckpointError(
            f"{weight.path}: tensor {weight.name}: differs from the embedding, "
            "expected equal as tie_word_embeddings is true",
            fix='set "tie_word_embeddings": false in config.json',
        )


def _fingerprint(description: str, files: dict[str, SafetensorsFile]) -> bytes:
    digest = hashlib.blake2b(description.encode(), digest_size=FINGERPRINT_BYTES)
    for name in sorted(files):
        file = files[name]
        header = file.tensors[name]
        digest.update(f"\n{name} {header.dtype_code} {header.shape}\n".encode())
        length = min(_SAMPLE_BYTES, header.nbytes)
        for start in (header.offset, header.offset + header.nbytes - length):
            digest.update(file.read(Extent(file, name, start, length)))
    return digest.digest()


def name_of_folder(folder: Path) -> str:
    """What a model is called: ORGANISATION/NAME in the cache of the hub's client, else its folder.

    Args:
        folder: Perhaps `models--ORGANISATION--NAME/snapshots/COMMIT`.
    """
    kind, _, name = folder.parent.parent.name.partition("--")
    if folder.parent.name == "snapshots" and kind == "models" and name:
        return name.replace("--", "/")
    return folder.name
