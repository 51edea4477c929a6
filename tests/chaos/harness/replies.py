"""Replies of an expert worker, and calls to it, that are not what they should be.

A fault takes a message and returns what is passed on instead. It spares most, so that the worker is
not simply left alone for good. What the worker itself might say has a checksum that is right.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

from expertmesh.checksum import sealed
from expertmesh.v1 import expert_service_pb2 as pb
from tests.chaos.harness.network import MessageFault

Change = Callable[[bytes], Sequence[bytes]]
_NAN = struct.pack("<f", float("nan"))


class Sometimes:
    """Applies a change to some of the messages.

    Args:
        change: What becomes of those.
        share: How many of all.
        seed: Of the choice.
    """

    def __init__(self, change: Change, share: float = 0.05, seed: int = 0) -> None:
        self.num_changed = 0
        self._change = change
        self._share = share
        self._chance = random.Random(seed)

    def __call__(self, message: bytes) -> Sequence[bytes]:
        """A `MessageFault`."""
        if self._chance.random() >= self._share:
            return (message,)
        self.num_changed += 1
        return self._change(message)


class BitFlip:
    """Another bit anywhere in a message, each time elsewhere."""

    def __init__(self) -> None:
        self._chance = random.Random(0)

    def __call__(self, message: bytes) -> Sequence[bytes]:
        """A change."""
        flipped, bit = bytearray(message), self._chance.randrange(8 * len(message))
        flipped[bit // 8] ^= 1 << bit % 8
        return (bytes(flipped),)


class OutOfOrder:
    """Keeps a reply back until after the next one."""

    def __init__(self) -> None:
        self._kept: bytes | None = None

    def __call__(self, reply: bytes) -> Sequence[bytes]:
        """A change."""
        kept, self._kept = self._kept, None
        if kept is not None:
            return (reply, kept)
        self._kept = reply
        return ()


def _sealed(message: pb.ForwardResponse) -> Sequence[bytes]:
    message.ClearField("checksum")
    return (sealed(message.SerializeToString()),)


def twice(reply: bytes) -> Sequence[bytes]:
    """The same reply two times."""
    return (reply, reply)


def lost(reply: bytes) -> Sequence[bytes]:
    """No reply."""
    return ()


def garbage(reply: bytes) -> Sequence[bytes]:
    """As many bytes that mean nothing."""
    return (b"\xff" * len(reply),)


def cut_short(reply: bytes) -> Sequence[bytes]:
    """A message that ends in the middle, in a frame that is as long as it says."""
    return (reply[: len(reply) // 2],)


def of_another_call(reply: bytes) -> Sequence[bytes]:
    """The id of a call that was never made."""
    message = pb.ForwardResponse.FromString(reply)
    message.id.step += 1_000_000
    return _sealed(message)


def of_another_life(reply: bytes) -> Sequence[bytes]:
    """Another incarnation than the one that was asked."""
    message = pb.ForwardResponse.FromString(reply)
    message.incarnation ^= 1
    return _sealed(message)


def of_wrong_shape(reply: bytes) -> Sequence[bytes]:
    """One row too few."""
    message = pb.ForwardResponse.FromString(reply)
    rows, width = message.outputs.shape
    message.outputs.shape[0] = rows - 1
    message.outputs.data = message.outputs.data[: (rows - 1) * width * 4]
    return _sealed(message)


def not_finite(reply: bytes) -> Sequence[bytes]:
    """NaN in the last element."""
    message = pb.ForwardResponse.FromString(reply)
    message.outputs.data = message.outputs.data[: -len(_NAN)] + _NAN
    return _sealed(message)


def refused(reply: bytes) -> Sequence[bytes]:
    """An error of the worker itself."""
    message = pb.ForwardResponse.FromString(reply)
    message.error.code = pb.ForwardError.CODE_INTERNAL
    message.error.message = "out of memory"
    return _sealed(message)


WRONG_REPLIES: dict[str, Callable[[], MessageFault]] = {
    "twice": lambda: twice,
    "garbage": lambda: garbage,
    "cut short": lambda: cut_short,
    "of another call": lambda: of_another_call,
    "of another life": lambda: of_another_life,
    "of wrong shape": lambda: of_wrong_shape,
    "not finite": lambda: not_finite,
    "refused": lambda: refused,
    "out of order": OutOfOrder,
    "with a bit flipped": BitFlip,
    "lost": lambda: lost,
}
"""Name to a maker of changes."""
