"""What Python and compiled code both know of the stream to an expert worker.

Owner: the stream, under its lock; counters belong to the model thread, whose compiled code raises
them without it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from attention_worker.call_times import TYPICAL
from attention_worker.direct_connection import DirectConnection
from expertmesh.v1 import attention_service_pb2 as pb
from expertmesh_kernels.cpu import exchange_words as words

_COUNTERS = (
    "calls",
    "rows_out",
    "bytes_out",
    "rows_back",
    "bytes_back",
    "compute_us",
    "round_trip_us",
)
"""Fields of an observation, in the order of the counters."""
_FORGIVEN = TYPICAL // 2
"""Slowness of who was long not asked: quick enough to be asked, even if the others have got quicker
meanwhile, and no quicker, or all would be asked of it."""


class Link:
    """Words in the layout of `exchange_words`.

    Args:
        incarnation: Of the expert worker.
        credits: Row credits to begin with.
    """

    def __init__(self, incarnation: int, credits: int) -> None:
        self._words = np.zeros(words.NUM_LINK_WORDS, np.int64)
        self._words[words.LINK_INCARNATION] = words.signed64(incarnation)
        self._words[words.LINK_SLOWNESS] = TYPICAL
        self._reported = self._counters()
        self.credits = credits

    @property
    def address(self) -> int:
        """Of the words, which live as long as this object."""
        return self._words.ctypes.data

    @property
    def credits(self) -> int:
        """Rows that may be on their way at a time."""
        return int(self._words[words.LINK_CREDITS])

    @credits.setter
    def credits(self, credits: int) -> None:
        self._words[words.LINK_CREDITS] = credits

    @property
    def rows_in_flight(self) -> int:
        """Rows of calls that went out through the stream and are not answered."""
        return int(self._words[words.LINK_IN_FLIGHT])

    @rows_in_flight.setter
    def rows_in_flight(self, num_rows: int) -> None:
        self._words[words.LINK_IN_FLIGHT] = num_rows

    @property
    def slowness(self) -> int:
        """How slow the expert worker is; see `expertmesh_kernels.cpu.call_times`."""
        return int(self._words[words.LINK_SLOWNESS])

    @slowness.setter
    def slowness(self, slowness: int) -> None:
        self._words[words.LINK_SLOWNESS] = slowness

    @property
    def queue_us(self) -> int:
        """How long its latest call waited there."""
        return int(self._words[words.LINK_QUEUE_US])

    @queue_us.setter
    def queue_us(self, queue_us: int) -> None:
        self._words[words.LINK_QUEUE_US] = queue_us

    @property
    def num_answers(self) -> int:
        """Calls that compiled code has seen answered."""
        return int(self._words[words.LINK_CALLS])

    @property
    def is_open(self) -> bool:
        """True if compiled code may send calls."""
        return bool(self._words[words.LINK_READY])

    def open(self, direct: DirectConnection) -> None:
        """From now on compiled code may send calls over this connection."""
        self._words[words.LINK_FD] = direct.descriptor
        self._words[words.LINK_READER] = direct.reader_words.ctypes.data
        self._words[words.LINK_READY] = 1

    def close(self) -> None:
        """It sends no more; from any thread."""
        self._words[words.LINK_READY] = 0

    def report(self, seen: pb.ExpertObservation) -> None:
        """Adds what compiled code counted since the last time."""
        counters = self._counters()
        news, self._reported = counters - self._reported, counters
        for field, value in zip(_COUNTERS, news.tolist(), strict=True):
            setattr(seen, field, getattr(seen, field) + value)

    def forgive(self) -> None:
        """Who was slow, perhaps for a moment only, and is not asked for that, is asked again soon.

        Half of it is forgiven; called twice a second while nothing is asked, that is in some
        seconds at most. If it is slow still, one late call is what it costs to know.
        """
        self.slowness -= max(0, self.slowness - _FORGIVEN) // 2

    def _counters(self) -> npt.NDArray[np.int64]:
        first = words.FIRST_COUNTER
        return self._words[first : first + len(_COUNTERS)].copy()
