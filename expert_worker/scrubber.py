"""Looks whether the weights in memory are still those that were loaded, over and over.

Thread: `scrubber` goes through the resident experts, a piece at a time, and rests in between. It
holds no lock while it sums, and no expert: one that is unloaded meanwhile is freed within a piece.
An expert whose memory was changed is taken out of service at once, as if it was unloaded, and
loaded again by the thread that loads experts.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from expert_worker.packed_sums import Piece, sums_of
from expert_worker.store import ExpertStore
from expertmesh.priority import stay_behind
from expertmesh_kernels.grouped_mlp import ExpertWeights

logger = logging.getLogger(__name__)

ExpertKey = tuple[int, int]
"""(layer, expert)."""
Reload = Callable[[int, int], None]
"""Loads a layer's expert again; returns when that was done or has failed."""

NICENESS = 10
"""As of the thread that loads: with less of a core it would keep Python's lock from others."""
_REST_S = 0.5  # between two passes, however few experts there are
_JOIN_S = 5.0
_MIB = 1 << 20


@dataclass(frozen=True)
class ScrubCounts:
    """What was looked at since the start."""

    nbytes: int = 0
    passes: int = 0
    """Times that all resident experts were looked at."""
    damaged: int = 0
    """Experts whose memory was changed."""


class Scrubber(Protocol):
    """Guards the memory of a store; made before experts are loaded."""

    def start(self) -> None:
        """Begins."""

    def stop(self) -> None:
        """Ends."""

    def counts(self) -> ScrubCounts:
        """From any thread."""


class NoScrubber:
    """Looks at nothing."""

    def start(self) -> None:
        """Nothing runs."""

    def stop(self) -> None:
        """Nothing runs."""

    def counts(self) -> ScrubCounts:
        """Nothing is counted."""
        return ScrubCounts()


@dataclass(frozen=True)
class _Loaded:
    """An expert and how it was; does not keep it in memory."""

    weights: weakref.ref[ExpertWeights]
    pieces: tuple[Piece, ...]


class MemoryScrubber:
    """For experts in the memory of the host.

    Args:
        store: Whose experts are looked at; those that it loads from now on.
        reload: Loads an expert that was taken out of service.
        mib_per_s: Most memory that is read.
    """

    def __init__(self, store: ExpertStore, reload: Reload, mib_per_s: int) -> None:
        self._store = store
        self._reload = reload
        self._bytes_per_s = mib_per_s * _MIB
        self._loaded: dict[ExpertKey, _Loaded] = {}  # bounded by the experts of the model
        self._counts = ScrubCounts()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scrubber", daemon=True)
        store.on_packed = self._remember

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Whoever reloads was stopped before, or ends what it does."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)

    def counts(self) -> ScrubCounts:
        """As of now."""
        return self._counts

    def look_at_all(self) -> None:
        """One pass over all that is resident."""
        for layer, held in self._store.residency().items():
            for expert in (*held.resident, *held.retiring):
                self._look_at(layer, expert)

    def _remember(self, layer: int, expert: int, weights: ExpertWeights) -> None:
        """In the thread that loads, before the expert is there for others."""
        self._loaded[layer, expert] = _Loaded(weakref.ref(weights), sums_of(weights))

    def _run(self) -> None:
        stay_behind(NICENESS)
        while not self._stopping.wait(_REST_S):
            self.look_at_all()
            self._counts = replace(self._counts, passes=self._counts.passes + 1)

    def _look_at(self, layer: int, expert: int) -> None:
        loaded = self._loaded.get((layer, expert))
        if loaded is None:
            return  # from before there was a scrubber
        for piece in loaded.pieces:
            weights = loaded.weights()
            if weights is None or self._stopping.is_set():
                return  # it was unloaded, or all ends
            is_intact = piece.is_intact(weights)
            self._counts = replace(self._counts, nbytes=self._counts.nbytes + piece.nbytes)
            if not is_intact:
                self._mend(layer, expert, weights)
                return
            del weights  # so that it may be freed while this thread rests
            self._stopping.wait(piece.nbytes / self._bytes_per_s)

    def _mend(self, layer: int, expert: int, weights: ExpertWeights) -> None:
        try:
            if not self._store.discard(layer, expert, weights):
                return  # unloaded in this moment, and perhaps loaded again
        except TimeoutError as error:
            logger.error("layer %d expert %d was changed in memory: %s", layer, expert, error)
            return
        self._counts = replace(self._counts, damaged=self._counts.damaged + 1)
        logger.error(
            "layer %d expert %d was changed in memory: it is refused until it was loaded again. If "
            "this happens more than once, have the memory of this machine tested",
            *(layer, expert),
        )
        self._reload(layer, expert)


def make_scrubber(store: ExpertStore, reload: Reload, mib_per_s: int) -> Scrubber:
    """What guards the memory of a store; nothing does on other devices than the CPU.

    Args:
        store: Before it loads experts.
        reload: See `MemoryScrubber`.
        mib_per_s: Most memory that is read; 0 for none.
    """
    if not mib_per_s or store.device.type != "cpu":
        return NoScrubber()
    return MemoryScrubber(store, reload, mib_per_s)
