"""Expands small codes to FP32 by table, two codes at a time: the tables hold pairs of values."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from expertmesh.host_tensor import Float32

Bytes = npt.NDArray[np.uint8]
Pairs = npt.NDArray[np.uint64]
"""Two values of 32 bits each."""

_CHUNK = 1 << 15
"""Entries per step, so that numpy's index buffer stays in the cache."""

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1; codes 8 to 15 are the same with a minus."""


def expand_e4m3(codes: Bytes, out: Float32) -> None:
    """FP8 E4M3 (finite only, NaN is 0x7F and 0xFF) as FP32. Both are flat."""
    even = codes.size // 2 * 2
    _take(_e4m3_pairs(), codes[:even].view("<u2"), out[:even])
    out[even:] = e4m3_values()[codes[even:]]


def expand_fp4(codes: Bytes, out: Float32) -> None:
    """Bytes of two FP4 E2M1 codes, low half first, as twice as many FP32. Both are flat."""
    _take(_fp4_pairs(), codes, out)


def expand_int4(codes: Bytes, out: Float32) -> None:
    """Bytes of two integers stored with 8 added, low half first, as FP32. Both are flat."""
    _take(_int4_pairs(), codes, out)


@cache
def e4m3_values() -> Float32:
    """Value of each of the 256 codes: sign, 4 bits of exponent (bias 7), 3 of mantissa."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    magnitude = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    magnitude[code & 0x7F == 0x7F] = np.nan
    return np.where(code & 0x80, -magnitude, magnitude).astype(np.float32)


def _take(pairs: Pairs, index: npt.NDArray[np.unsignedinteger], out: Float32) -> None:
    out_pairs = out.view(np.uint64)
    for start in range(0, index.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        # Every index is in range by its type; "clip" only keeps numpy from checking them.
        np.take(pairs, index[part], out=out_pairs[part], mode="clip")


@cache
def _e4m3_pairs() -> Pairs:
    values, code = e4m3_values(), np.arange(1 << 16)
    return _pairs(values[code & 0xFF], values[code >> 8])


@cache
def _fp4_pairs() -> Pairs:
    values, code = np.array([*FP4_VALUES, *(-v for v in FP4_VALUES)], np.float32), np.arange(256)
    return _pairs(values[code & 15], values[code >> 4])


@cache
def _int4_pairs() -> Pairs:
    code = np.arange(256)
    return _pairs((code & 15).astype(np.float32) - 8, (code >> 4).astype(np.float32) - 8)


def _pairs(first: Float32, second: Float32) -> Pairs:
    return np.stack([first, second], axis=1).reshape(-1).view(np.uint64)
