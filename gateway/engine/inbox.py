"""The engine's inbox: what other threads ask of the engine thread, with one bound and one wake-up.

Any thread puts, the engine thread takes. Cancels are only kept for requests that are known, so
their number is bounded by that of the requests.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from expertmesh.errors import OverloadedError, RequestError, StoppingError
from gateway.sequence import GenerationRequest


@dataclass(frozen=True)
class QueueLimits:
    """How much may wait."""

    max_requests: int
    """Requests that wait beyond those for which a request slot is free."""
    max_tokens: int
    """Prompt tokens that wait. A single longer prompt is taken if nothing else waits."""


@dataclass(frozen=True)
class EngineLoad:
    """What waits in the scheduler, told by the engine after each turn."""

    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_free_slots: int = 0


@dataclass(frozen=True)
class Commands:
    """What was asked since the last time."""

    requests: tuple[GenerationRequest, ...] = ()
    cancelled: tuple[str, ...] = ()
    map_changed: bool = False
    stop: bool = False


class Inbox:
    """Commands for the engine thread.

    Args:
        limits: How much may wait, here and in the scheduler.
        load: Load before the first turn.
    """

    def __init__(self, limits: QueueLimits, load: EngineLoad) -> None:
        self._limits = limits
        self._load = load
        self._changed = threading.Condition()
        self._requests: list[GenerationRequest] = []
        self._cancelled: dict[str, None] = {}  # ordered, each once
        self._known: set[str] = set()
        self._poked = False
        self._map_changed = False
        self._stop = False

    def put_request(self, request: GenerationRequest) -> None:
        """Queues a request. Raises OverloadedError if too much waits, RequestError if its id is
        in use."""
        with self._changed:
            if self._stop:
                raise StoppingError()
            if request.request_id in self._known:
                raise RequestError(
                    f"request id {request.request_id!r} is in use", param="request_id"
                )
            self._check_room(len(request.prompt_token_ids))
            self._known.add(request.request_id)
            self._requests.append(request)
            self._changed.notify()

    def put_cancel(self, request_id: str) -> bool:
        """Asks for the end of a request; False if it is unknown or ended."""
        with self._changed:
            if request_id not in self._known:
                return False
            self._cancelled[request_id] = None
            self._changed.notify()
            return True

    def poke(self, *, map_changed: bool = False) -> None:
        """Wakes the engine thread, so that it looks around."""
        with self._changed:
            self._poked = True
            self._map_changed |= map_changed
            self._changed.notify()

    def stop(self) -> None:
        """Asks the engine thread to end; nothing is accepted any more."""
        with self._changed:
            self._stop = True
            self._changed.notify()

    def take(self, timeout_s: float | None) -> Commands:
        """Everything asked so far; waits for something if there is nothing.

        Args:
            timeout_s: Longest wait; None is without limit, since `stop` always wakes.
        """
        with self._changed:
            self._changed.wait_for(self._has_news, timeout_s)
            commands = Commands(
                tuple(self._requests), tuple(self._cancelled), self._map_changed, self._stop
            )
            self._load = self._load_with(commands.requests)
            self._requests, self._cancelled = [], {}
            self._poked = self._map_changed = False
            return commands

    def forget(self, request_id: str) -> None:
        """A request ended: its id is free again."""
        with self._changed:
            self._known.discard(request_id)
            self._cancelled.pop(request_id, None)

    def update_load(self, load: EngineLoad) -> None:
        """The engine's load after a turn."""
        with self._changed:
            self._load = load

    @property
    def num_waiting(self) -> int:
        """Requests that wait, here and in the scheduler."""
        with self._changed:
            return len(self._requests) + self._load.num_waiting

    def _has_news(self) -> bool:
        return bool(self._requests or self._cancelled or self._poked or self._stop)

    def _load_with(self, taken: tuple[GenerationRequest, ...]) -> EngineLoad:
        tokens = sum(len(request.prompt_token_ids) for request in taken)
        return EngineLoad(
            self._load.num_waiting + len(taken),
            self._load.num_waiting_tokens + tokens,
            self._load.num_free_slots,
        )

    def _check_room(self, num_tokens: int) -> None:
        load = self._load_with(tuple(self._requests))
        room = self._limits.max_requests + load.num_free_slots
        if load.num_waiting >= room:
            raise OverloadedError(
                f"{load.num_waiting} requests are waiting, the limit is {room}", retry_after_s=1.0
            )
        waiting = load.num_waiting_tokens
        if waiting and waiting + num_tokens > self._limits.max_tokens:
            raise OverloadedError(
                f"{waiting} prompt tokens are waiting and the prompt has {num_tokens}, the limit "
                f"is {self._limits.max_tokens}",
                retry_after_s=1.0,
            )
