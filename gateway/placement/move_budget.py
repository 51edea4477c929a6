"""How many bytes of weights may be loaded for what is not urgent."""

from __future__ import annotations


class MoveBudget:
    """A token bucket of bytes.

    It may run into debt by one expert, so that no expert is too large for it.

    Args:
        bytes_per_minute: What flows in.
        expert_nbytes: Bytes of one expert.
        burst_s: Seconds of it that may be saved up.
    """

    def __init__(self, bytes_per_minute: int, expert_nbytes: int, burst_s: float = 10.0) -> None:
        self._bytes_per_s = bytes_per_minute / 60
        self._expert_nbytes = expert_nbytes
        self._most = self._bytes_per_s * burst_s
        self._bytes = self._most
        self._since_s: float | None = None

    def take(self, now_s: float) -> bool:
        """Takes the bytes of one expert if the bucket is not empty.

        Args:
            now_s: On a monotonic clock.
        """
        passed_s = 0.0 if self._since_s is None else max(0.0, now_s - self._since_s)
        self._since_s = now_s
        self._bytes = min(self._most, self._bytes + passed_s * self._bytes_per_s)
        if self._bytes <= 0:
            return False
        self._bytes -= self._expert_nbytes
        return True
