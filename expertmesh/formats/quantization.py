"""How a checkpoint stores each of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from expertmesh.formats.codec import Codec
from expertmesh.formats.fp8 import Fp8Blocks
from expertmesh.formats.modules import NameParts, Targets, module_of
from expertmesh.formats.mxfp4 import Mxfp4

EXPERT_PARAMETERS = frozenset({"experts.gate_up", "experts.down"})
QUANTISABLE = EXPERT_PARAMETERS | {
    "qkv", "q", "q_a", "q_b", "kv_a", "kv_b", "o", "gate_up", "down", "shared_gate_up",
    "shared_down", "lm_head",
}  # fmt: skip
"""Parameters that may be quantised, by our names without the layer. Gates, norms, biases and
embeddings never are: a gate's logits decide discretely, the others are small or looked up."""


class Quantization(Protocol):
    """The `quantization_config` of a checkpoint. Immutable; its repr tells two of them apart."""

    @property
    def key(self) -> str:
        """Of config.json, for messages."""

    @property
    def skip_list(self) -> str:
        """Key of the list of modules that are not quantised, for messages."""

    def codec_of(self, tensor: str) -> Codec | None:
        """How a matrix is stored; None for plainly. Only asked for what may be quantised.

        Args:
            tensor: The name that it has, or would have if it were stored plainly.
        """


@dataclass(frozen=True)
class NotQuantized:
    """Every weight is stored plainly."""

    key: str = "quantization_config"
    skip_list: str = ""

    def codec_of(self, tensor: str) -> Codec | None:
        """None."""
        return None


@dataclass(frozen=True)
class Fp8:
    """`quant_method` fp8: every matrix but the skipped ones."""

    format: Fp8Blocks
    skipped: NameParts
    key: str
    skip_list: str

    def codec_of(self, tensor: str) -> Codec | None:
        """The format, unless the module is skipped."""
        return None if self.skipped.match(module_of(tensor)) else self.format


@dataclass(frozen=True)
class Mxfp4Experts:
    """`quant_method` mxfp4: the experts, stacked."""

    skipped: NameParts
    key: str
    skip_list: str

    def codec_of(self, tensor: str) -> Codec | None:
        """The format, for experts that are not skipped."""
        module = module_of(tensor)
        stacked = module.endswith(".experts") and not self.skipped.match(module)
        return Mxfp4() if stacked else None


@dataclass(frozen=True)
class CompressedTensors:
    """`quant_method` compressed-tensors: groups of targets, each with its format."""

    targets: Targets
    formats: tuple[tuple[str, Codec | None], ...]
    """Target to format, None for not quantised."""
    ignored: Targets
    key: str
    skip_list: str

    def codec_of(self, tensor: str) -> Codec | None:
        """The format of the most exact target, unless the module is ignored."""
        module = module_of(tensor)
        target = self.targets.match(module)
        if target is None or self.ignored.match(module):
            return None
        return dict(self.formats)[target]
