"""How long the engine waits for experts without a usable copy. Owner: the engine thread."""

from __future__ import annotations

from expertmesh.errors import ExpertUnavailableError


class ExpertHold:
    """Requests are held from the first abandoned step until one is computed again.

    Args:
        limit_s: Longest hold; after it, requests of an abandoned step end.
        retry_s: Time between two tries without news about expert workers.
    """

    def __init__(self, limit_s: float, retry_s: float = 0.2) -> None:
        self._limit_s = limit_s
        self._retry_s = retry_s
        self._since_s: float | None = None
        self._retry_at_s = 0.0

    @property
    def active(self) -> bool:
        """True while requests are held."""
        return self._since_s is not None

    def pause(self, now_s: float) -> None:
        """A step was abandoned."""
        if self._since_s is None:
            self._since_s = now_s
        self._retry_at_s = now_s + self._retry_s

    def retry_now(self) -> None:
        """There is a newer expert map."""
        self._retry_at_s = 0.0

    def clear(self) -> None:
        """A step was computed, or nothing is left to hold."""
        self._since_s = None

    def held_s(self, now_s: float) -> float:
        """How long requests have been held."""
        return 0.0 if self._since_s is None else now_s - self._since_s

    def expired(self, now_s: float) -> bool:
        """True if the time is up."""
        return self._since_s is not None and self.held_s(now_s) >= self._limit_s

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next try; 0 if it is due."""
        return max(0.0, self._retry_at_s - now_s) if self.active else 0.0


def unavailable_error(missing: tuple[tuple[int, int], ...], message: str) -> ExpertUnavailableError:
    """The error of an abandoned step.

    Args:
        missing: (layer, expert) pairs.
        message: What the attention worker says; it often names the missing experts already.
    """
    named = str(ExpertUnavailableError(missing))
    detail = message.removeprefix(named).removeprefix(": ")
    return ExpertUnavailableError(missing, detail=detail)
