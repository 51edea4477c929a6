"""When requests must be done. Owner: the engine thread."""

from __future__ import annotations

import heapq
import math

from gateway.sequence import GenerationRequest


class Deadlines:
    """Deadlines of the requests that are known.

    Args:
        longest_s: Seconds after its arrival at which any request is overdue.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._known: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def add(self, request: GenerationRequest) -> None:
        """Starts to watch a request."""
        latest_s = request.arrival_s + self._longest_s
        deadline_s = latest_s if request.deadline_s is None else min(request.deadline_s, latest_s)
        self._known[request.request_id] = deadline_s
        heapq.heappush(self._heap, (deadline_s, request.request_id))

    def forget(self, request_id: str) -> None:
        """A request ended."""
        self._known.pop(request_id, None)
        if len(self._heap) > 2 * len(self._known) + 64:
            self._heap = [entry for entry in self._heap if self._is_valid(*entry)]
            heapq.heapify(self._heap)

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next deadline, which may be one of a request that ended."""
        return max(0.0, self._heap[0][0] - now_s) if self._heap else math.inf

    def overdue(self, now_s: float) -> list[str]:
        """Requests whose deadline has passed; each is named once."""
        found = []
        while self._heap and self._heap[0][0] <= now_s:
            deadline_s, request_id = heapq.heappop(self._heap)
            if self._is_valid(deadline_s, request_id):
                del self._known[request_id]
                found.append(request_id)
        return found

    def _is_valid(self, deadline_s: float, request_id: str) -> bool:
        """False for what is left of a request that ended, also if its id is in use again."""
        return self._known.get(request_id) == deadline_s
