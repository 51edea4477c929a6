"""What scales expert workers, or does nothing.

Thread: `scaling` has an event loop of its own, with one task that takes a turn every few seconds.
Whatever is asked of the API server is asked there.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from prometheus_client.registry import CollectorRegistry

from gateway.cluster.loop_thread import LoopThread
from gateway.scaling.autoscaler import Autoscaler
from gateway.scaling.metrics import ScalingCollector
from gateway.scaling.scale_target import ScaleTarget

TURN_S = 5.0
_JOIN_S = 5.0


class Scaler(Protocol):
    """Keeps the number of expert workers right. Methods are called by who starts and stops it."""

    def register(self, registry: CollectorRegistry) -> None:
        """Adds its metrics."""

    def start(self) -> None:
        """Begins."""

    def stop(self) -> None:
        """Ends; no thread is left."""


class NoScaler:
    """The number is somebody else's business."""

    def register(self, registry: CollectorRegistry) -> None:
        """There are none."""

    def start(self) -> None:
        """Nothing runs."""

    def stop(self) -> None:
        """Nothing runs."""


class ThreadScaler:
    """Lets an autoscaler take turns.

    Args:
        autoscaler: What is run.
        target: What it writes to; closed at the end.
        turn_s: Seconds between turns.
    """

    def __init__(self, autoscaler: Autoscaler, target: ScaleTarget, turn_s: float = TURN_S) -> None:
        self._autoscaler = autoscaler
        self._target = target
        self._turn_s = turn_s
        self._thread = LoopThread("scaling", self._take_turns)

    def register(self, registry: CollectorRegistry) -> None:
        """Adds its metrics."""
        registry.register(ScalingCollector(self._autoscaler.report))

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; a number that is being written may or may not be."""
        self._thread.stop(_JOIN_S)

    async def _take_turns(self) -> None:
        try:
            while True:
                await self._autoscaler.turn(time.monotonic())
                await asyncio.sleep(self._turn_s)
        finally:
            await self._target.close()
