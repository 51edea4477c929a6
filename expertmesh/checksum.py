"""Seals: the checksum at the end of a Forward message, so that bytes changed on the way are found.

    message = body | tag of the field `checksum` | checksum of the body, 8 bytes

With the words w[0], w[1], ... of 4 bytes, little-endian, of a body that zeros fill up to whole
words, the checksum is  length + sum of (2 i + 3) * w[i]  modulo 2**64. For messages below 2 GiB it
finds for certain any one or two flipped bits, in the body and in the seal, any run of 32 bits that
was changed in the body, and any two words that changed places; other damage unless the weighted
sum of its differences is 0. It is a sum so that compiled code (`expertmesh_kernels.cpu.checksum`)
reads memory as fast as it can, and so that a message in parts need not be joined.
"""

from __future__ import annotations

import struct

import numpy as np

from expertmesh.v1 import expert_service_pb2 as pb

_FIELD = pb.ForwardRequest.DESCRIPTOR.fields_by_name["checksum"].number
_SEAL = struct.Struct("<BQ")
_TAG = _FIELD << 3 | 1
SEAL_BYTES = _SEAL.size
"""At the end of a message."""

_MODULUS = 2**64
_WORD = np.dtype("<u4")
_FIRST_WEIGHT = 3
_BLOCK = 2**14  # words whose products stay in the caches
_WEIGHTS = (2 * np.arange(_BLOCK) + _FIRST_WEIGHT).astype(np.uint64)

Part = bytes | bytearray | memoryview


def seal(*parts: Part) -> bytes:
    """What follows a body that consists of these parts."""
    return _SEAL.pack(_TAG, checksum(*parts))


def sealed(body: Part) -> bytes:
    """A whole message."""
    return bytes(body) + seal(body)


def is_sealed(message: Part) -> bool:
    """True if the message is as it was when it was sealed."""
    view = memoryview(message)
    return len(view) >= SEAL_BYTES and seal(view[:-SEAL_BYTES]) == view[-SEAL_BYTES:]


def checksum(*parts: Part) -> int:
    """Of the body that these parts make up, wherever it is cut."""
    total = at = 0
    for part in parts:
        total += _sum_at(memoryview(part), at)
        at += len(part)
    return (at + total) % _MODULUS


def _sum_at(part: memoryview, at: int) -> int:
    """The share of the bytes that begin at `at`: a word is the sum of its bytes."""
    begun, word = at % _WORD.itemsize, at // _WORD.itemsize
    total = 0
    if begun:
        head, part = part[: _WORD.itemsize - begun], part[_WORD.itemsize - begun :]
        total += _weight(word) * int.from_bytes(bytes(begun) + head, "little")
        word += 1
    num_words = len(part) // _WORD.itemsize
    words = np.frombuffer(part, _WORD, num_words)
    for first in range(0, num_words, _BLOCK):
        block = words[first : first + _BLOCK].astype(np.uint64)
        # As if the block were the first one, and what its words weigh more.
        total += int(block @ _WEIGHTS[: block.size]) + 2 * (word + first) * int(block.sum())
    rest = part[num_words * _WORD.itemsize :]
    return total + _weight(word + num_words) * int.from_bytes(rest, "little")


def _weight(word: int) -> int:
    return 2 * word + _FIRST_WEIGHT
