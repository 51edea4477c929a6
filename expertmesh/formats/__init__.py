"""Quantised storage of weights. A weight is decoded when it is read; nothing is ever guessed.

`parse_quantization` reads what `config.json` says; the `WeightFormat` of a weight names the tensors
that it is stored as and turns them into FP32.
"""

from expertmesh.formats.parse import parse_quantization
from expertmesh.formats.quantization import QUANTISABLE, NotQuantized, Quantization
from expertmesh.formats.weight_format import (
    NUMPY_TYPES,
    PartData,
    StoredPart,
    WeightFormat,
)

__all__ = [
    "NUMPY_TYPES",
    "QUANTISABLE",
    "NotQuantized",
    "PartData",
    "Quantization",
    "StoredPart",
    "WeightFormat",
    "parse_quantization",
]
