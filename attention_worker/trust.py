"""Whether an expert worker is asked for what others hold too.

One that lets a call be late is *suspect* until it is heard of: a late reply is enough, and so is
one to a probe. So who starves for want of cores is asked again as soon as it answers, and who hangs
is not. One whose replies are wrong is *ejected*, for a time that doubles, and is then asked again.
Neither matters for experts of which nobody else has a copy.

Owner: the stream to that expert worker, under its lock.
"""

from __future__ import annotations

import time

from expertmesh.v1 import expert_service_pb2 as pb

HONEST_CODES = frozenset(
    {
        pb.ForwardError.CODE_EXPERT_NOT_RESIDENT,
        pb.ForwardError.CODE_RESOURCE_EXHAUSTED,
        pb.ForwardError.CODE_DEADLINE_EXCEEDED,
    }
)
"""Answers that are about the call or the moment, and say nothing against who gives them."""
FINAL_CODES = frozenset(
    {
        pb.ForwardError.CODE_STALE_INCARNATION,
        pb.ForwardError.CODE_WRONG_MODEL,
        pb.ForwardError.CODE_DRAINING,
    }
)
"""Answers after which this life of the expert worker is not asked again for a while."""
FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 30.0
"""Between probes, and without being asked after wrong replies."""
LOG_INTERVAL_S = 1.0
MOST_WRONG = 2
"""Wrong replies before it is ejected,"""
RIGHT_BETWEEN = 50
"""unless there were so many right ones between them."""
RIGHT_AFTER = 1000
"""Right replies after which the time without being asked is the shortest one again."""
REFUSED_S = 2.0
"""Until it is asked again; a map without it comes sooner, if it meant what it said."""


class Refusal:
    """What an expert worker said of itself, so that this life of it is not asked for a while."""

    def __init__(self) -> None:
        self._reason = ""
        self._until_s = 0.0

    def begin(self, reason: str) -> None:
        """It said so just now."""
        self._reason, self._until_s = reason, time.monotonic() + REFUSED_S

    def reason(self) -> str:
        """What it said; nothing if it may be asked."""
        if self._reason and time.monotonic() >= self._until_s:
            self._reason = ""
        return self._reason


class Trust:
    """What earlier calls to an expert worker say of the next."""

    def __init__(self) -> None:
        self._is_late = False
        self._probe_at_s = 0.0
        self._silent_until_s = 0.0
        self._num_wrong = 0
        self._right_then = 0  # right replies when the latest wrong one came
        self._ejected_until_s = 0.0
        self._ejection_s = FIRST_BACKOFF_S
        self.num_probes = 0
        """Since it is silent."""

    def is_suspect(self, now_s: float) -> bool:
        """True if others are to be asked."""
        return self._is_late or now_s < self._ejected_until_s

    def be_late(self, now_s: float) -> bool:
        """A call is late; true if that is worth a line in the log: once a second at most."""
        if self._is_late:
            return False
        self._is_late = True
        self.num_probes = 0
        self._probe_at_s = now_s + FIRST_BACKOFF_S
        if now_s < self._silent_until_s:
            return False
        self._silent_until_s = now_s + LOG_INTERVAL_S
        return True

    def be_heard(self) -> None:
        """A reply came, whether anybody waits for it or not."""
        self._is_late = False

    def be_wrong(self, now_s: float, num_right: int) -> bool:
        """A reply was wrong; true if it is ejected for that.

        Args:
            now_s: On the monotonic clock.
            num_right: Right replies so far.
        """
        between, self._right_then = num_right - self._right_then, num_right
        self._num_wrong = self._num_wrong + 1 if between < RIGHT_BETWEEN else 1
        if between >= RIGHT_AFTER:
            self._ejection_s = FIRST_BACKOFF_S
        if self._num_wrong < MOST_WRONG:
            return False
        self._num_wrong = MOST_WRONG - 1  # the next one ejects it again
        self._ejected_until_s = now_s + self._ejection_s
        self._ejection_s = min(2 * self._ejection_s, LONGEST_BACKOFF_S)
        return True

    def wants_probe(self, now_s: float) -> bool:
        """True once each time that it should be asked something to hear of it."""
        if not self._is_late or now_s < self._probe_at_s:
            return False
        self.num_probes += 1
        self._probe_at_s = now_s + min(FIRST_BACKOFF_S * 2**self.num_probes, LONGEST_BACKOFF_S)
        return True
