"""How each layer's experts are held in memory: as in the checkpoint, quantised on load, or plain.

A function of the checkpoint and of settings alone, so that gateway and workers agree without
asking; what a worker does is told in its `ModelIdentity`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import SettingsError
from expertmesh.formats.coded import CodeName
from expertmesh.formats.keep import Coding
from expertmesh.model_config import DtypeName, ModelConfig
from expertmesh.settings import ExpertDtype

INT4_GROUP = 32
_BITS: Mapping[CodeName, int] = {"int8": 8, "int4": 4, "fp8": 8, "mxfp4": 4}
_ON_LOAD: Mapping[str, Coding] = {"int8": Coding("int8", 0), "int4": Coding("int4", INT4_GROUP)}


@dataclass(frozen=True)
class ExpertPlan:
    """What becomes of the experts of a checkpoint."""

    dtype: DtypeName
    """Of those that are plain, and of all biases."""
    on_load: Coding | None = None
    """Plain weights are quantised so when they are read."""
    kept: Mapping[int, Coding] = field(default_factory=dict)
    """Layers whose experts stay as they are stored, and how that is."""
    expanded: tuple[str, ...] = ()
    """Stored formats that are expanded to `dtype`, as no kernel takes them, for messages."""

    def coding(self, layer: int) -> Coding | None:
        """How a layer's experts are held; None for plainly."""
        return self.on_load or self.kept.get(layer)

    def codings(self, config: ModelConfig) -> set[Coding | None]:
        """All that occur in a model."""
        return {self.coding(layer) for layer in config.moe_layers}

    @property
    def name(self) -> str:
        """For messages and comparisons, such as `bfloat16` or `int4 in groups of 32`."""
        if self.on_load is not None:
            return self.on_load.name
        return ", ".join(sorted({coding.name for coding in self.kept.values()})) or self.dtype

    def expert_nbytes(self, config: ModelConfig, itemsize: int) -> int:
        """Bytes of one expert in memory, without padding; the largest if layers differ.

        Args:
            config: The model.
            itemsize: Bytes of an element of `dtype`.
        """
        return max(
            (self._nbytes(config, layer, itemsize) for layer in config.moe_layers), default=0
        )

    def all_experts_nbytes(self, config: ModelConfig, itemsize: int) -> int:
        """Bytes of all experts of all layers."""
        return sum(
            self._nbytes(config, layer, itemsize) * config.moe_ffn(layer).num_experts
            for layer in config.moe_layers
        )

    def _nbytes(self, config: ModelConfig, layer: int, itemsize: int) -> int:
        ffn, hidden, coding = config.moe_ffn(layer), config.hidden_size, self.coding(layer)
        wide = ffn.intermediate_size
        biases = (2 * wide + hidden) * itemsize if ffn.bias else 0
        if coding is None:
            return 3 * wide * hidden * itemsize + biases
        shapes = (2 * wide, hidden), (hidden, wide)
        return sum(coded_nbytes(coding, *shape) for shape in shapes) + biases


def coded_nbytes(coding: Coding, rows: int, columns: int) -> int:
    """Bytes of codes, FP32 scales and, of int4, a byte for each zero point."""
    num_groups = ceil(columns / coding.group) if coding.group else 1
    per_group = 5 if coding.kind == "int4" else 4
    return ceil(rows * columns * _BITS[coding.kind] / 8) + rows * num_groups * per_group


def plan_experts(checkpoint: Checkpoint, setting: ExpertDtype, dtype: DtypeName) -> ExpertPlan:
    """Decides it.

    Args:
        checkpoint: The model.
        setting: `--expert-dtype`.
        dtype: Of plain weights.

    Raises:
        SettingsError: Experts that are quantised already were to be quantised another way.
    """
    stored = checkpoint.expert_formats()
    if setting in _ON_LOAD:
        if stored:
            raise SettingsError(
                f"expert_dtype is {setting}, but the experts of {checkpoint.name} are stored as "
                f"{', '.join(stored)}",
                fix="use --expert-dtype auto or plain",
            )
        return ExpertPlan(
            dtype, on_load=_ON_LOAD[setting] if checkpoint.config.moe_layers else None
        )
    if setting == "plain" or not stored:
        return ExpertPlan(dtype)
    kept = {
        layer: coding
        for layer in checkpoint.config.moe_layers
        if (coding := checkpoint.expert_coding(layer)) is not None
    }
    is_whole = len(kept) == len(checkpoint.config.moe_layers)
    return ExpertPlan(dtype, kept=kept, expanded=() if is_whole else stored)
