"""Remembers the last minutes of a mesh: a thread that looks once a second."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from gateway.telemetry.history import INTERVAL_S, History, Moment
from gateway.telemetry.sources import Sources

_JOIN_S = 2.0


@dataclass(frozen=True)
class Window:
    """What happened between two moments."""

    begin: Moment
    end: Moment

    @property
    def seconds(self) -> float:
        """How long it is; above 0."""
        return max(1e-9, self.end.at_s - self.begin.at_s)


class Telemetry:
    """The recent past of the mesh. Methods may be called from any thread.

    Args:
        sources: What is looked at.
    """

    def __init__(self, sources: Sources | None = None) -> None:
        self.sources = sources or Sources()
        self.born_s = time.monotonic()
        self._history = History(self._look())
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def start(self) -> None:
        """Starts the thread; without it a window is all the time there was."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)

    def window(self, seconds: float | None) -> Window:
        """What happened in the last so many seconds; None is since the start."""
        now = self._look()
        return Window(self._history.begin_of(seconds, now.at_s), now)

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            self._history.add(self._look())

    def _look(self) -> Moment:
        sources = self.sources
        stats = sources.stats()
        return Moment(
            at_s=time.monotonic(),
            gate_rows_LE=sources.gate_rows(),
            dispatch={calls.worker_id: calls for calls in stats.dispatch},
            pairs={
                (known.view.worker_id, known.view.incarnation): known.layer_pairs
                for known in sources.known_workers()
            },
            requests=sources.requests.snapshot(),
            num_steps=stats.num_steps,
        )
