"""Which format each weight of a checkpoint has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from expertmesh.formats.codec import Codec
from expertmesh.formats.fp8 import Fp8Blocks
from expertmesh.formats.modules import NameParts, Targets, module_of
from expertmesh.formats.mxfp4 import Mxfp4


class Quantization(Protocol):
    """What config.json says of quantisation. Immutable; the repr tells two of them apart."""

    @property
    def key(self) -> str:
        """Of config.json, for messages."""

    @property
    def skip_list(self) -> str:
        """Key of the list of modules that are not quantised, for messages."""

    @property
    def why_plain(self) -> str:
        """Why a weight without a codec is not quantised, for messages."""

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
    why_plain: str = "config.json has no quantization_config"

    def codec_of(self, tensor: str) -> Codec | None:
        """None."""
        return None


@dataclass(frozen=True)
class ConfigKeys:
    """Where the config is, for messages."""

    key: str
    skip_list: str

    @property
    def why_plain(self) -> str:
        """The config says so."""
        return f"{self.key} leaves its module out ({self.skip_list})"


@dataclass(frozen=True)
class Fp8(ConfigKeys):
    """`quant_method` fp8: every matrix but the skipped ones."""

    codec: Fp8Blocks
    skipped: NameParts

    def codec_of(self, tensor: str) -> Codec | None:
        """The codec, unless the module is skipped."""
        return None if self.skipped.match(module_of(tensor)) else self.codec


@dataclass(frozen=True)
class Mxfp4Experts(ConfigKeys):
    """`quant_method` mxfp4: the experts, stacked."""

    skipped: NameParts

    def codec_of(self, tensor: str) -> Codec | None:
        """The codec, for experts that are not skipped."""
        module = module_of(tensor)
        stacked = module.endswith(".experts") and not self.skipped.match(module)
        return Mxfp4() if stacked else None


@dataclass(frozen=True)
class CompressedTensors(ConfigKeys):
    """`quant_method` compressed-tensors: groups of targets, each with its codec."""

    targets: Targets
    codecs: tuple[tuple[str, Codec | None], ...]
    """Target to codec, None for not quantised."""
    ignored: Targets

    def codec_of(self, tensor: str) -> Codec | None:
        """The codec of the most exact target, unless the module is ignored."""
        module = module_of(tensor)
        target = self.targets.match(module)
        if target is None or self.ignored.match(module):
            return None
        return self._codec_of_target[target]

    @cached_property
    def _codec_of_target(self) -> dict[str, Codec | None]:
        return dict(self.codecs)
