"""Finds quantised weights in the files of a checkpoint, and reads them decoded.

What config.json says and what the files hold have to agree: a weight that should be quantised and
is plain, or the other way round, is an error that names its tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from expertmesh.errors import CheckpointError
from expertmesh.formats.codec import NUMPY_TYPES, Codec, PartData, factors
from expertmesh.formats.coded import CodedMatrix
from expertmesh.formats.keep import Coding, coding_of, keep
from expertmesh.formats.quantization import Quantization
from expertmesh.host_tensor import Array, Float32
from expertmesh.model_config import DtypeName
from expertmesh.safetensors_file import DTYPE_NAMES
from expertmesh.weight_storage import (
    PLAIN,
    FileTensor,
    OnBytes,
    Shape,
    StoredWeight,
    TensorFiles,
    Weight,
    unheard,
)

OUTPUT = "lm_head"
QUANTISABLE = frozenset(
    {
        "qkv", "q", "q_a", "q_b", "kv_a", "kv_b", "o", "gate_up", "down", "shared_gate_up",
        "shared_down", "experts.gate_up", "experts.down", OUTPUT,
    }
)  # fmt: skip
"""Parameters that may be quantised. Gates, norms, biases and embeddings never are: a gate's logits
decide discretely, the others are small or looked up."""

_MAIN_SUFFIXES = ("", "_packed", "_blocks")
"""Of the tensors that hold a weight's codes, in all formats."""
_ANY_SUFFIX = (*_MAIN_SUFFIXES, "_scale", "_scale_inv", "_scales")
"""Of the tensors by which one sees that there has to be a weight."""


@dataclass(frozen=True)
class QuantizedStorage:
    """Weights are stored as a `quantization_config` says. A `WeightStorage`."""

    quantization: Quantization

    def holds(self, weight: Weight, files: TensorFiles) -> bool:
        """Whether there is anything of it, in whatever format."""
        return any(weight.name + suffix in files for suffix in _ANY_SUFFIX)

    def take(self, weight: Weight, files: TensorFiles) -> StoredWeight:
        """The tensors of the format that the weight has to have."""
        codec = self.codec_of(weight)
        plain = _is_plain(files.find(weight.name))
        if codec is None:
            if not plain:
                self._refuse_quantised(weight, files)
            return PLAIN.take(weight, files)
        if plain and weight.parameter == OUTPUT:
            # Whether a list has to name the output differs from writer to writer.
            return PLAIN.take(weight, files)
        if plain:
            self._refuse_plain(weight, codec, files)
        return _take(weight, codec, files)

    def codec_of(self, weight: Weight) -> Codec | None:
        """How a weight has to be stored; None for plainly."""
        if weight.parameter not in QUANTISABLE:
            return None
        return self.quantization.codec_of(weight.name)

    def _refuse_quantised(self, weight: Weight, files: TensorFiles) -> None:
        found = [files.find(weight.name + suffix) for suffix in _MAIN_SUFFIXES]
        tensor = next((tensor for tensor in found if tensor is not None), None)
        if tensor is None:
            return
        why = self.quantization.why_plain
        if weight.parameter not in QUANTISABLE:
            why = "gates, norms, biases and embeddings are never quantised"
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name}: expected type {' or '.join(DTYPE_NAMES)} as "
            f"{why}, found {tensor.header.dtype_code}",
            fix="check that config.json belongs to these files",
        )

    def _refuse_plain(self, weight: Weight, codec: Codec, files: TensorFiles) -> None:
        tensor = files.find(weight.name)
        assert tensor is not None
        key, skip_list = self.quantization.key, self.quantization.skip_list
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name}: expected {codec.name} as {key} says, found a "
            f"plain tensor of type {tensor.header.dtype_code}",
            fix=f"add its module to {key}.{skip_list} in config.json if it was not quantised",
        )


def _is_plain(tensor: FileTensor | None) -> bool:
    return tensor is not None and tensor.header.dtype_code in DTYPE_NAMES


def _take(weight: Weight, codec: Codec, files: TensorFiles) -> QuantizedWeight:
    shape = _coded_shape(weight.shape, codec)
    try:
        parts = codec.parts(shape)
    except ValueError as error:
        raise CheckpointError(
            f"{files.folder}: tensor {weight.name}: {error}",
            fix="check that config.json belongs to these files",
        ) from error
    tensors = tuple(
        files.take(weight.name + part.suffix, part.shape, part.dtype_codes) for part in parts
    )
    scales = tuple(t for t, part in zip(tensors, parts, strict=True) if part.is_scale)
    return QuantizedWeight(weight, codec, tensors, scales)


def _coded_shape(shape: Shape, codec: Codec) -> Shape:
    """Shape of the matrix that codes make up."""
    return (*shape[:-2], *shape[:-3:-1]) if codec.transposed else shape


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight stored as codes with scales. A `StoredWeight`; reads give FP32.

    FP32 because codes times scales have more digits than bfloat16 holds: a model served in
    bfloat16 rounds once, one served in FP32 computes with exactly what the file means.
    """

    weight: Weight
    codec: Codec
    tensors: tuple[FileTensor, ...]
    """In the order of the codec's parts."""
    scales: tuple[FileTensor, ...]
    """Those of them whose values are factors."""

    @property
    def name(self) -> str:
        """Name of the codes."""
        return self.tensors[0].name

    @property
    def path(self) -> Path:
        """File of the codes."""
        return self.tensors[0].path

    @property
    def shape(self) -> Shape:
        """Of the weight."""
        return self.weight.shape

    @property
    def dtype(self) -> DtypeName:
        """FP32."""
        return "float32"

    def nbytes(self, index: int | None = None) -> int:
        """Bytes of all tensors."""
        return sum(tensor.extent(index).nbytes for tensor in self.tensors)

    def read(
        self, index: int | None = None, out: Array | None = None, on_bytes: OnBytes = unheard
    ) -> Array:
        """The weight or one entry, decoded."""
        shape = self.shape if index is None else self.shape[1:]
        assert len(shape) == 2, f"{self.name}: read by entry"
        parts = [_read_part(tensor, index, on_bytes) for tensor in self.tensors]
        self._check_scales(parts)
        if out is None or self.codec.transposed:
            decoded = self._decode(parts, np.empty(_coded_shape(shape, self.codec), np.float32))
            decoded = decoded.T if self.codec.transposed else decoded
            if out is None:
                return decoded
            out[...] = decoded
            return out
        return self._decode(parts, out.view(np.float32))

    @property
    def coding(self) -> Coding | None:
        """How kernels take it as it is, the rows being those of `read` or, if the codec is
        transposed, its columns; None if none does."""
        return coding_of(self.codec)

    def read_coded(self, index: int | None = None, on_bytes: OnBytes = unheard) -> CodedMatrix:
        """The weight or one entry, not decoded; tells of its bytes as `read` does.

        Raises:
            CheckpointError: As for `read`, or a code stands for NaN.
        """
        shape = self.shape if index is None else self.shape[1:]
        parts = [_read_part(tensor, index, on_bytes) for tensor in self.tensors]
        self._check_scales(parts)
        rows, columns = _coded_shape(shape, self.codec)
        try:
            matrix = keep(self.codec, parts, rows, columns)
        except ValueError as error:
            raise CheckpointError(
                f"{self.path}: tensor {self.weight.name}{error}", fix="download the file again"
            ) from error
        if not matrix.is_finite():
            raise CheckpointError(
                f"{self.path}: tensor {self.name}: holds NaN or infinity, expected finite weights",
                fix="download the file again",
            )
        return matrix

    def _decode(self, parts: list[PartData], out: Float32) -> Float32:
        try:
            self.codec.decode(parts, out)
        except ValueError as error:
            raise CheckpointError(
                f"{self.path}: tensor {self.weight.name}{error}", fix="download the file again"
            ) from error
        return out

    def _check_scales(self, parts: list[PartData]) -> None:
        for tensor, part in zip(self.tensors, parts, strict=True):
            if tensor in self.scales and not np.isfinite(factors(part)).all():
                raise CheckpointError(
                    f"{tensor.path}: tensor {tensor.name}: holds NaN or infinity, expected finite "
                    "scales",
                    fix="download the file again",
                )


def _read_part(tensor: FileTensor, index: int | None, on_bytes: OnBytes) -> PartData:
    code = tensor.header.dtype_code
    return PartData(tensor.read(NUMPY_TYPES[code], index, on_bytes=on_bytes), code)
