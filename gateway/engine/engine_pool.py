"""Several engines, one attention worker each, behind the face of one.

A request belongs to the engine that it was given to: that is where its KV blocks are. If its
attention worker is lost it waits there and is computed again; others are not touched.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence

from expertmesh.errors import OverloadedError, RequestError
from gateway.engine.engine import Engine
from gateway.engine.request_placement import Place, RequestPlacement
from gateway.engine.scheduler_limits import SchedulerLimits
from gateway.sequence import DispatchStats, EngineStats, GenerationRequest, RequestOutput


class EnginePool:
    """Gives requests to engines. Public methods may be called from any thread.

    Args:
        engines: At least one; they serve the same model with the same limits.
        dispatch: Gives totals of the calls to expert workers, for `stats`.
        dropped: Gives the total of (row, expert) pairs that were left out, likewise.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        dispatch: Callable[[], tuple[DispatchStats, ...]] = tuple,
        dropped: Callable[[], int] = int,
    ) -> None:
        self._engines = tuple(engines)
        self._dispatch, self._dropped = dispatch, dropped
        self._lock = threading.Lock()
        self._placement = RequestPlacement(len(engines), engines[0].limits.kv_block_size)
        self._place_of: dict[str, Place] = {}
        self._lives = [engine.num_lives for engine in engines]

    def start(self) -> None:
        """Starts the threads of the engines."""
        for engine in self._engines:
            engine.start()

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request with the engine that suits it best, or the next that takes it.

        Raises:
            OverloadedError: Too much waits everywhere, or no attention worker comes back.
            RequestError: It can never fit, or its id is in use.
        """
        if request.request_id in self._place_of:
            message = f"request id {request.request_id!r} is in use"
            raise RequestError(message, param="request_id")
        names = self._placement.names(request.prompt_token_ids, request.cache_salt)
        refusal = OverloadedError("no attention worker takes requests", retry_after_s=5.0)
        for place in self._rank(names, len(request.prompt_token_ids)):
            with self._lock:
                self._placement.enter(place, names)
                self._place_of[request.request_id] = place
            try:
                sink = _PlacedSink(self, place, request)
                self._engines[place.engine].submit(dataclasses.replace(request, sink=sink))
                return
            except OverloadedError as error:
                self._withdraw(request.request_id, place)
                refusal = error
            except BaseException:
                self._withdraw(request.request_id, place)
                raise
        raise refusal

    def cancel(self, request_id: str) -> None:
        """Ends a request with FinishReason.ABORT; no effect on one that is unknown or ended."""
        with self._lock:
            place = self._place_of.get(request_id)
        if place is not None:
            self._engines[place.engine].cancel(request_id)

    def map_changed(self) -> None:
        """There is a newer expert map: abandoned steps are tried again at once."""
        for engine in self._engines:
            engine.map_changed()

    def stats(self) -> EngineStats:
        """Load of all engines together."""
        parts = [engine.stats() for engine in self._engines]
        total = EngineStats(alive=all(part.alive for part in parts), dispatch=self._dispatch())
        counts = [field.name for field in dataclasses.fields(EngineStats) if field.type == "int"]
        sums = {name: sum(getattr(part, name) for part in parts) for name in counts}
        sums["num_dropped_pairs"] = self._dropped()
        return dataclasses.replace(total, **sums)

    @property
    def ready(self) -> bool:
        """True while an attention worker is up."""
        return any(engine.ready for engine in self._engines)

    @property
    def limits(self) -> SchedulerLimits:
        """What each attention worker has room for; the least of them where they differ."""
        return min((engine.limits for engine in self._engines), key=lambda it: it.max_model_len)

    def stop(self, timeout_s: float) -> bool:
        """Ends all requests with an error, and the threads after the steps in flight.

        Returns:
            False if one has not ended in time.
        """
        for engine in self._engines:
            engine.tell_to_stop()
        ended = [engine.stop(timeout_s) for engine in self._engines]  # each is waited for
        return all(ended)

    def computed(self, place: Place) -> None:
        """The prompt of a request was computed."""
        with self._lock:
            self._placement.computed(place)

    def left(self, request_id: str, place: Place) -> None:
        """A request ended."""
        with self._lock:
            self._place_of.pop(request_id, None)
            self._placement.leave(place)

    def _rank(self, names: Sequence[bytes], num_tokens: int) -> list[Place]:
        """Places, best first: those that are up; if none is, all, as they are being restarted."""
        everyone = range(len(self._engines))
        usable = [index for index in everyone if self._engines[index].ready] or list(everyone)
        with self._lock:
            for index, engine in enumerate(self._engines):
                if engine.num_lives != self._lives[index]:
                    self._lives[index] = engine.num_lives
                    self._placement.forget(index)
            return self._placement.rank(names, num_tokens, usable)

    def _withdraw(self, request_id: str, place: Place) -> None:
        self.computed(place)
        self.left(request_id, place)


class _PlacedSink:
    """Passes outputs on, and tells the pool how far a request is."""

    def __init__(self, pool: EnginePool, place: Place, request: GenerationRequest) -> None:
        self._pool = pool
        self._place = place
        self._request_id = request.request_id
        self._sink = request.sink
        self._pending = True

    def __call__(self, output: RequestOutput) -> None:
        if self._pending:
            self._pending = False
            self._pool.computed(self._place)
        if output.finish_reason is not None:
            self._pool.left(self._request_id, self._place)
        self._sink(output)
