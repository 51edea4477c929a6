"""Reads experts from the checkpoint and packs them for the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from expertmesh.checkpoint import Checkpoint, CodedExpert
from expertmesh.expert_fingerprint import ExpertFingerprint
from expertmesh.expert_plan import ExpertPlan
from expertmesh.formats.coded import CodedMatrix, quantize_int4, quantize_int8
from expertmesh.formats.keep import Coding
from expertmesh.host_tensor import HostTensor, to_float32
from expertmesh.model_config import DtypeName
from expertmesh.weight_storage import OnBytes
from expertmesh_kernels.cpu.checksum import checksum
from expertmesh_kernels.grouped_mlp import ExpertWeights, pack_coded_expert, pack_expert
from expertmesh_kernels.host import TORCH_DTYPES, to_torch

_MODULUS = 2**64


@dataclass(frozen=True)
class LoadedExpert:
    """An expert as it was read."""

    weights: ExpertWeights
    fingerprint: int
    """Of the bytes of the files; see `expertmesh.expert_fingerprint`."""


@dataclass(frozen=True)
class ExpertReader:
    """Reads any expert of a checkpoint; from any thread."""

    checkpoint: Checkpoint
    plan: ExpertPlan
    codings: Mapping[int, Coding]
    """Layers whose experts are held quantised."""
    dtype: DtypeName
    """Type of the weights in memory."""
    device: torch.device

    def read(self, layer: int, expert: int) -> LoadedExpert:
        """An expert on the device, in new memory.

        Raises:
            CheckpointError: It cannot be read.
        """
        fingerprint = ExpertFingerprint(checksum_of)
        weights = self._read(layer, expert, fingerprint.add)
        return LoadedExpert(weights, fingerprint.value)

    def _read(self, layer: int, expert: int, on_bytes: OnBytes) -> ExpertWeights:
        if layer in self.codings:
            coded = self._read_coded(layer, expert, on_bytes)
            return pack_coded_expert(
                coded.gate_up,
                coded.down,
                self._optional(coded.gate_up_bias),
                self._optional(coded.down_bias),
                dtype=TORCH_DTYPES[self.dtype],
            )
        tensors = self.checkpoint.read_expert(layer, expert, on_bytes)
        return pack_expert(
            self._tensor(tensors.gate_up),
            self._tensor(tensors.down),
            self._optional(tensors.gate_up_bias),
            self._optional(tensors.down_bias),
        )

    def _read_coded(self, layer: int, expert: int, on_bytes: OnBytes) -> CodedExpert:
        """An expert as it is stored, or quantised now."""
        coding = self.plan.on_load
        if coding is None:
            return self.checkpoint.read_coded_expert(layer, expert, on_bytes)
        tensors = self.checkpoint.read_expert(layer, expert, on_bytes)
        return CodedExpert(
            _quantized(tensors.gate_up, coding),
            _quantized(tensors.down, coding),
            tensors.gate_up_bias,
            tensors.down_bias,
        )

    def _tensor(self, tensor: HostTensor) -> Tensor:
        """A tensor on the device, in the type of the weights in memory."""
        return to_torch(tensor.data, tensor.dtype, TORCH_DTYPES[self.dtype]).to(self.device)

    def _optional(self, tensor: HostTensor | None) -> Tensor | None:
        return None if tensor is None else self._tensor(tensor)


def checksum_of(data: npt.NDArray[np.uint8]) -> int:
    """That of `expertmesh.checksum`, in compiled code and without Python's lock."""
    return int(checksum(data, 0, data.size)) % _MODULUS


def _quantized(tensor: HostTensor, coding: Coding) -> CodedMatrix:
    weight = to_float32(tensor.data, tensor.dtype)
    if coding.kind == "int8":
        return quantize_int8(weight)
    return quantize_int4(weight, coding.group)
