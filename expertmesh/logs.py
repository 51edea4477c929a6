"""Logging of every process: to standard error, as lines for people or as JSON.

A record may carry `fields`, a mapping for programs (`extra={"fields": {...}}`): JSON has them as
keys of their own, and for people the message says what they need.

A line carries the name of its process, so that the output of `expertmesh serve` and its children,
which share one standard error, can be told apart. Into a pipe that nobody reads fits only so much:
further lines are left out and counted, as nobody may wait for a reader of the log.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import stat
import sys

from expertmesh.settings import LogSettings


class TextFormatter(logging.Formatter):
    """`12:00:00.123 INFO    gateway: message`, local time.

    Args:
        process: Name of this process.
    """

    def __init__(self, process: str) -> None:
        super().__init__(
            "%(asctime)s.%(msecs)03d %(levelname)-7s "
            + process.replace("%", "%%")
            + ": %(message)s",
            datefmt="%H:%M:%S",
        )


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, process, logger, message, the record's
    fields, exception.

    Args:
        process: Name of this process.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        time = datetime.datetime.fromtimestamp(record.created, tz=datetime.UTC)
        entry = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class LossyPipe:
    """A pipe into which lines are written as far as they fit, without waiting.

    Args:
        fd: The writing end, which is ours alone and never blocks.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""  # of a line that did not fit
        self._num_lost = 0  # since somebody last asked

    def take_lost(self) -> int:
        """How many lines were left out since the last time, once there is room to say so.

        Raises:
            OSError: The reader is gone.
        """
        if not self._num_lost or not self._has_room():
            return 0
        lost, self._num_lost = self._num_lost, 0
        return lost

    def _has_room(self) -> bool:
        """True once earlier lines are written."""
        try:
            while self._rest:
                self._rest = self._rest[os.write(self._fd, self._rest) :]
        except BlockingIOError:
            return False
        return True

    def write(self, line: str) -> None:
        """Writes a line, now or before the next one; leaves it out if another still waits."""
        if not self._has_room():
            self._num_lost += 1
            return
        self._rest = line.encode(errors="backslashreplace")
        self._has_room()

    def flush(self) -> None:
        """There is nothing to wait for."""


class PipeHandler(logging.StreamHandler[LossyPipe]):
    """Writes to a `LossyPipe`, and says how much was left out once that is possible again."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record if there is room."""
        try:
            lost = self.stream.take_lost()
        except OSError:  # the reader is gone
            self.handleError(record)
            return
        if lost:
            text = "%d lines of the log were lost, as nobody read them"
            super().emit(logging.LogRecord(__name__, logging.WARNING, "", 0, text, (lost,), None))
        super().emit(record)


def configure_logging(settings: LogSettings, process: str) -> None:
    """Sends the records of all loggers to standard error. Call once, at start.

    Args:
        settings: Level and format.
        process: Name of this process, e.g. `expert worker 0`.
    """
    handler = _handler()
    handler.setFormatter(_formatter(settings, process))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(settings.log_level.upper())
    # It shows a traceback for each malformed message of a peer; we name the peer in one line.
    logging.getLogger("grpc._common").setLevel(logging.CRITICAL)
    if settings.log_level != "debug":  # they log every request and every compiled function
        for noisy in ("aiohttp.access", "asyncio", "numba"):
            logging.getLogger(noisy).setLevel(logging.WARNING)


def _handler() -> logging.Handler:
    """For standard error; one that never waits, if that is a pipe."""
    try:
        fd = sys.stderr.fileno()
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            # Opened anew, since whoever shares the pipe with us may want to wait for room in it.
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
            return PipeHandler(LossyPipe(os.open(f"/proc/self/fd/{fd}", flags)))
    except OSError:  # no file, no such system, or not allowed
        pass
    return logging.StreamHandler(sys.stderr)


def _formatter(settings: LogSettings, process: str) -> logging.Formatter:
    text = settings.log_format == "text" or (settings.log_format == "auto" and sys.stderr.isatty())
    return TextFormatter(process) if text else JsonFormatter(process)
