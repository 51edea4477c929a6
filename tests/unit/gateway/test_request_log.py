"""One line of the log for each request that ended, and two observers that are told the same."""

from __future__ import annotations

import inspect
import json
import logging

import pytest

from expertmesh.logs import JsonFormatter, TextFormatter
from gateway.engine.engine_observer import EngineObserver, ObserverPair, RequestTimes
from gateway.request_log import RequestLog
from gateway.sequence import FinishReason, GenerationRequest, SamplingParams

SECRET = 424_242
REQUEST = GenerationRequest(
    *("cmpl-1-0", (5, 6, SECRET), SamplingParams(max_tokens=8), lambda output: None, 0.0),
    call_id="req-1",
)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> RequestLog:
    """A log of which every line is kept."""
    caplog.set_level(logging.INFO)
    return RequestLog("demo")


def line(caplog: pytest.LogCaptureFixture, formatter: logging.Formatter) -> str:
    """The only line there is."""
    (record,) = caplog.records
    return formatter.format(record)


def test_line_of_a_request(log: RequestLog, caplog: pytest.LogCaptureFixture) -> None:
    """Ids, tokens, times and the reason: a sentence for people, keys for programs."""
    log.request_started(REQUEST, 0.25)
    log.first_token(REQUEST, 0.5)
    log.next_token(REQUEST, 0.125)
    log.request_timed(REQUEST, RequestTimes(0.25, 1.0, 2, 1))
    log.request_finished(REQUEST, FinishReason.STOP, 2, 1.5)
    text = line(caplog, TextFormatter("gateway"))
    assert text.endswith(
        "gateway: request cmpl-1-0 (req-1) ended, stop: 3 prompt tokens, 1 of them cached, "
        "2 output tokens; 0.250 s queued, first token after 0.500 s, 1.500 s in all"
    )
    entry = json.loads(line(caplog, JsonFormatter("gateway")))
    assert text.endswith(entry["message"])
    assert {key: entry[key] for key in list(entry)[5:]} == {
        "request_id": "cmpl-1-0",
        "call_id": "req-1",
        "model": "demo",
        "prompt_tokens": 3,
        "cached_tokens": 1,
        "output_tokens": 2,
        "queue_s": 0.25,
        "ttft_s": 0.5,
        "total_s": 1.5,
        "finish_reason": "stop",
    }
    assert str(SECRET) not in text + json.dumps(entry)


def test_line_of_a_request_that_never_ran(
    log: RequestLog, caplog: pytest.LogCaptureFixture
) -> None:
    """It waited all the time and has no first token."""
    log.request_finished(REQUEST, FinishReason.ABORT, 0, 2.0)
    entry = json.loads(line(caplog, JsonFormatter("gateway")))
    assert (entry["queue_s"], entry["ttft_s"], entry["finish_reason"]) == (2.0, None, "abort")
    assert "2.000 s queued, no token, 2.000 s in all" in entry["message"]


def test_nothing_is_kept_of_what_has_ended(log: RequestLog) -> None:
    """The same id may come again."""
    for _ in range(2):
        log.request_started(REQUEST, 0.0)
        log.request_finished(REQUEST, FinishReason.LENGTH, 8, 1.0)
    assert log._running == {}


def test_pair_tells_both_everything() -> None:
    """Each method of an observer, with the same arguments, in order."""
    told: list[tuple[str, str, tuple[object, ...]]] = []
    names = [name for name, _ in inspect.getmembers(EngineObserver, inspect.isfunction)]

    def recorder(who: str) -> EngineObserver:
        methods = {
            name: lambda self, *args, name=name: told.append((who, name, args)) for name in names
        }
        return type("Recorder", (EngineObserver,), methods)()  # type: ignore[no-any-return]

    pair = ObserverPair(recorder("one"), recorder("other"))
    for name in names:
        method = getattr(pair, name)
        arguments = tuple(range(len(inspect.signature(method).parameters)))
        told.clear()
        method(*arguments)
        assert told == [("one", name, arguments), ("other", name, arguments)]
    assert len(names) >= 10
