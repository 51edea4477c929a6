"""Quantised storage of weights. A weight is decoded when it is read; nothing is ever guessed.

`parse_quantization` reads what `config.json` says; the `Codec` of a weight names the tensors
that hold it and turns them into FP32.
"""

from expertmesh.formats.codec import Codec
from expertmesh.formats.parse import parse_quantization, read_quantization
from expertmesh.formats.quantization import NotQuantized, Quantization
from expertmesh.formats.storage import QuantizedStorage

__all__ = [
    "Codec",
    "NotQuantized",
    "Quantization",
    "QuantizedStorage",
    "parse_quantization",
    "read_quantization",
]
