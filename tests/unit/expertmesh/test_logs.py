"""Log lines name their process, as text or as JSON."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import sys
from collections.abc import Iterator

import pytest

from expertmesh.logs import configure_logging
from expertmesh.settings import LogSettings


@pytest.fixture(autouse=True)
def restored_root() -> Iterator[None]:
    """Gives the root logger its handlers and level back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for people: time, level, process, message."""
    configure_logging(LogSettings(log_format="text"), "expert worker 0")
    logging.getLogger("x").warning("row %d", 3)

    line = capsys.readouterr().err
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} WARNING expert worker 0: row 3\n", line)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for machines holds the same, with the exception in one field."""
    configure_logging(LogSettings(log_format="json"), "gateway")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("gateway.engine").exception("a step failed")

    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry.pop("time"))
    assert "ValueError: broken" in entry.pop("exception")
    expected = {
        "level": "error",
        "process": "gateway",
        "logger": "gateway.engine",
        "message": "a step failed",
    }
    assert expected == entry


def test_auto_is_json_where_nobody_watches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal the format is JSON, on one it is text."""
    configure_logging(LogSettings(), "gateway")
    logging.getLogger().info("a")
    assert capsys.readouterr().err.startswith("{")

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    configure_logging(LogSettings(), "gateway")
    logging.getLogger().info("b")
    assert capsys.readouterr().err.endswith("gateway: b\n")


def test_level(capsys: pytest.CaptureFixture[str]) -> None:
    """Less severe records are not written, and one call replaces the handlers of another."""
    configure_logging(LogSettings(log_level="info", log_format="text"), "a")
    configure_logging(LogSettings(log_level="error", log_format="text"), "b")
    logging.getLogger().warning("quiet")
    logging.getLogger().error("loud")

    assert [line.split("ERROR   ")[1] for line in capsys.readouterr().err.split("\n") if line] == [
        "b: loud"
    ]


@pytest.mark.timeout(30)
def test_pipe_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a reader; later the log says how many lines are missing."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    with open(reading, "rb", buffering=0) as reader, open(writing, "w") as writer:
        monkeypatch.setattr(sys, "stderr", writer)
        configure_logging(LogSettings(log_format="text"), "gateway")
        for number in range(300):
            logging.getLogger().info("line %d", number)
        early = reader.read(1 << 20)
        logging.getLogger().info("at last")
        lines = (early + reader.read(1 << 20)).decode().splitlines()

    kept = [int(line.rpartition(" ")[2]) for line in lines[:-2]]
    assert kept == list(range(len(kept)))
    assert 0 < len(kept) < 300
    num_lost = 300 - len(kept)
    assert lines[-2].endswith(f"{num_lost} lines of the log were lost, as nobody read them")
    assert lines[-1].endswith("gateway: at last")
