"""Says what the bytes of an expert must be: those of the gateway's own checkpoint.

Thread: `arbiter` reads one expert after the other, so that nobody else waits for the disk.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import CheckpointError
from expertmesh.expert_fingerprint import read_fingerprint
from gateway.placement.state import ExpertKey

_JOIN_S = 2.0


@dataclass(frozen=True)
class Answer:
    """What the gateway's own checkpoint has."""

    key: ExpertKey
    fingerprint: int | None
    """None if it could not be read."""
    problem: str = ""
    """Why not."""


OnAnswer = Callable[[Answer], None]


class Arbiter(Protocol):
    """Is asked about experts whose copies differ; methods may be called from any thread."""

    def start(self, on_answer: OnAnswer) -> None:
        """Begins; each question gets one answer, in any thread."""

    def ask(self, key: ExpertKey) -> None:
        """Wants to know about an expert. Returns at once."""

    def stop(self) -> None:
        """Ends; what was asked last may stay without an answer."""


class NoArbiter:
    """For a gateway without expert workers: nothing is ever asked."""

    def start(self, on_answer: OnAnswer) -> None:
        """Nothing runs."""

    def ask(self, key: ExpertKey) -> None:
        """Nobody holds an expert."""

    def stop(self) -> None:
        """Nothing runs."""


class CheckpointArbiter:
    """Reads the expert in question from a checkpoint.

    Args:
        checkpoint: Open until after `stop`.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._on_answer: OnAnswer = lambda answer: None
        self._stopping = False
        self._keys: queue.SimpleQueue[ExpertKey | None] = queue.SimpleQueue()  # each expert once
        self._thread = threading.Thread(target=self._run, name="arbiter", daemon=True)

    def start(self, on_answer: OnAnswer) -> None:
        """Starts the thread."""
        self._on_answer = on_answer
        self._thread.start()

    def ask(self, key: ExpertKey) -> None:
        """Has the thread read it."""
        self._keys.put(key)

    def stop(self) -> None:
        """Ends the thread once it has read what it reads."""
        self._stopping = True
        self._keys.put(None)
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while (key := self._keys.get()) is not None and not self._stopping:
            self._on_answer(self._read(key))

    def _read(self, key: ExpertKey) -> Answer:
        try:
            return Answer(key, read_fingerprint(self._checkpoint, *key))
        except (CheckpointError, OSError, MemoryError) as error:
            return Answer(key, None, str(error) or type(error).__name__)
