"""Fingerprints: 64 bits of the bytes that an expert was read from.

Equal bytes give equal fingerprints, whatever the files are called, however they are cut into shards
and whatever becomes of the weights in memory. Any change of 32 neighbouring bits of one tensor is
found for certain, so any one weight; other damage as `expertmesh.checksum` says. They are no
protection against somebody who wants them to be equal.

    fingerprint = sum of (2 p + 1) * checksum of tensor p    modulo 2**64
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from expertmesh.checkpoint import Checkpoint
from expertmesh.checksum import checksum

Checksum = Callable[[npt.NDArray[np.uint8]], int]
"""That of `expertmesh.checksum`, modulo 2**64; compiled code is quicker and says the same."""

_MODULUS = 2**64


def _in_numpy(data: npt.NDArray[np.uint8]) -> int:
    return checksum(data.data)


class ExpertFingerprint:
    """Grows with each tensor of an expert: `add` is for `Checkpoint.read_expert`.

    Args:
        checksum_of: Of one tensor.

    Attributes:
        value: The fingerprint, once all of the expert was read.
    """

    def __init__(self, checksum_of: Checksum = _in_numpy) -> None:
        self.value = 0
        self._checksum = checksum_of
        self._weight = 1

    def add(self, data: npt.NDArray[np.uint8]) -> None:
        """Takes the next tensor."""
        self.value = (self.value + self._weight * self._checksum(data)) % _MODULUS
        self._weight += 2


def read_fingerprint(checkpoint: Checkpoint, layer: int, expert: int) -> int:
    """Of an expert of a checkpoint; reads its bytes and keeps nothing.

    Raises:
        CheckpointError: It cannot be read.
    """
    fingerprint = ExpertFingerprint()
    checkpoint.read_expert(layer, expert, fingerprint.add)
    return fingerprint.value
