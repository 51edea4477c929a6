"""Quantised storage of weights. A weight is decoded when it is read; nothing is ever guessed.

`parse_quantization` reads what `config.json` says; the `Codec` of a weight names the tensors
that hold it and turns them into FP32.
"""

from expertmesh.formats.codec import (
    NUMPY_TYPES,
    Codec,
    PartData,
    StoredPart,
)
from expertmesh.formats.parse import parse_quantization
from expertmesh.formats.quantization import QUANTISABLE, NotQuantized, Quantization

__all__ = [
    "NUMPY_TYPES",
    "QUANTISABLE",
    "Codec",
    "NotQuantized",
    "PartData",
    "Quantization",
    "StoredPart",
    "parse_quantization",
]
