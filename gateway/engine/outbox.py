"""Outputs of the engine on their way to the event loop: one call per turn, however many there are.

Filled and published by the engine thread; sinks are called in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import functools
import logging

from gateway.sequence import RequestOutput, Sink

logger = logging.getLogger("gateway.engine")


class Outbox:
    """Collects the outputs of a turn.

    Args:
        loop: Event loop whose thread calls the sinks.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._outputs: list[tuple[Sink, RequestOutput]] = []

    def add(self, sink: Sink, output: RequestOutput) -> None:
        """Keeps an output until `publish`."""
        self._outputs.append((sink, output))

    def publish(self) -> None:
        """Hands everything to the event loop; without outputs it is left alone."""
        if not self._outputs:
            return
        outputs, self._outputs = self._outputs, []
        try:
            self._loop.call_soon_threadsafe(functools.partial(_deliver, outputs))
        except RuntimeError:  # the loop is closed: nobody waits for these any more
            logger.warning("dropped %d outputs: the event loop is closed", len(outputs))


def _deliver(outputs: list[tuple[Sink, RequestOutput]]) -> None:
    """In the event loop: one bad sink must not keep others from their outputs."""
    for sink, output in outputs:
        try:
            sink(output)
        except Exception:
            logger.exception("the sink of request %s failed", output.request_id)
