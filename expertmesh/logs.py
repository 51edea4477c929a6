"""Logging of every process: to standard error, as lines for people or as JSON.

A line carries the name of its process, so that the output of `expertmesh serve` and its children,
which share one standard error, can be told apart.
"""

from __future__ import annotations

import datetime
import json
import logging
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
    """One JSON object a line: time (RFC 3339, UTC), level, process, logger, message, exception.

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
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure_logging(settings: LogSettings, process: str) -> None:
    """Sends the records of all loggers to standard error. Call once, at start.

    Args:
        settings: Level and format.
        process: Name of this process, e.g. `expert worker 0`.
    """
    handler = logging.StreamHandler(sys.stderr)
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


def _formatter(settings: LogSettings, process: str) -> logging.Formatter:
    text = settings.log_format == "text" or (settings.log_format == "auto" and sys.stderr.isatty())
    return TextFormatter(process) if text else JsonFormatter(process)
