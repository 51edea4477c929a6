"""Expert workers that are not there, come later, or go away while requests run."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.conftest import Models
from tests.support.api import Api, Json, completion_body, tokens_of_events
from tests.support.mesh import (
    ExpertProcess,
    Server,
    expert_worker,
    gateway,
    serve,
    start_expert_workers,
    wait_ready,
    watch_once,
)
from tests.support.oracle import prompts
from tests.support.processes import free_port, poll, processes_of
from tests.support.tiny_checkpoints import MIXTRAL

pytestmark = pytest.mark.alone

NAMED_WITHIN_S = 5.0
SHORT_HOLD_S = 3.0
"""For tests of what happens after the hold."""
LONG_HOLD_S = 60.0
"""For tests in which an expert worker comes back, however busy the machine is."""

NUM_TOKENS = 300
LOWEST_PRIORITY = 19


@pytest.fixture(scope="module")
def model_dir(models: Models) -> Path:
    """A tiny Mixtral of 8 experts."""
    return models.tiny(MIXTRAL)


@pytest.fixture(scope="module")
def prompt(model_dir: Path) -> list[int]:
    """A prompt of this model."""
    return prompts(MIXTRAL.vocab_size, [20], seed=8)[0]


@pytest.fixture(scope="module")
def expected(models: Models, model_dir: Path, prompt: list[int]) -> tuple[int, ...]:
    """Its greedy continuation in transformers."""
    return models.oracle(model_dir).greedy(prompt, NUM_TOKENS).token_ids


@contextmanager
def _mesh(
    model_dir: Path,
    addresses: Sequence[str],
    *,
    ready: bool = True,
    hold_s: float = SHORT_HOLD_S,
) -> Iterator[Server]:
    flags = ("--experts-hold-s", str(hold_s), "--drain-grace-s", "0.5")
    with gateway(model_dir, addresses, *flags, ready=ready) as server:
        yield server


def _worker_at(status: Json, address: str) -> Json:
    found = [worker for worker in status["workers"] if worker["address"] == address]
    assert len(found) == 1, status
    return found[0]


def _uncovered(status: Json) -> dict[int, list[int]]:
    return {int(layer): experts for layer, experts in status["uncovered"].items()}


def test_silent_addresses_are_named_then_experts_come(
    model_dir: Path, prompt: list[int], expected: tuple[int, ...]
) -> None:
    """Within 5 s, log and /ready name addresses that refuse or never speak, and what they lack.
    While experts are missing, requests get 503; when they come, the mesh serves them."""
    with ExitStack() as stack:
        half = stack.enter_context(expert_worker(model_dir, experts="0/2"))
        mute = stack.enter_context(socket.socket())
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        silent = f"127.0.0.1:{mute.getsockname()[1]}"
        port = free_port()
        closed = f"127.0.0.1:{port}"
        server = stack.enter_context(_mesh(model_dir, [half.address, silent, closed], ready=False))

        def named() -> bool:
            log = server.process.stderr
            answer = server.api.ready()
            states = {worker["address"]: worker["state"] for worker in answer.json["workers"]}
            return (
                silent in log
                and closed in log
                and states == {half.address: "ready", silent: "unreachable", closed: "unreachable"}
            )

        poll(named, timeout_s=NAMED_WITHIN_S, what="both addresses are named")
        _check_what_is_missing(server.api, silent, closed)
        _check_that_requests_end(server.api, prompt)
        with expert_worker(model_dir, experts="1/2", port=port):
            wait_ready(server.api, timeout_s=10)
            assert expected[:40] == server.api.complete(prompt, 40).token_ids
            assert _uncovered(server.api.ready().json) == {}
        poll(lambda: server.api.ready().status == 503, timeout_s=5, what="/ready is 503 again")


def _check_what_is_missing(api: Api, silent: str, closed: str) -> None:
    answer = api.ready()
    assert answer.status == 503
    layers = range(MIXTRAL.num_layers)
    assert {layer: [4, 5, 6, 7] for layer in layers} == _uncovered(answer.json)
    assert answer.json["message"] == f"{4 * len(layers)} experts have no usable copy"
    assert _worker_at(answer.json, closed)["message"]
    assert _worker_at(answer.json, silent)["message"]
    assert api.get("/health").status == 200


def _check_that_requests_end(api: Api, prompt: list[int]) -> None:
    started = time.monotonic()
    answer = api.post("/v1/completions", completion_body(prompt, 4))
    assert time.monotonic() - started < SHORT_HOLD_S + 3
    assert (answer.status, answer.error["code"]) == (503, "expert_unavailable")
    assert "expert" in answer.error["message"]
    assert float(answer.headers["retry-after"]) > 0
    events = list(api.stream("/v1/completions", completion_body(prompt, 4)))
    assert [event["error"]["code"] for event in events] == ["expert_unavailable"]


class Streamed:
    """A streamed completion that is read in a thread of its own."""

    def __init__(self, api: Api, prompt: list[int]) -> None:
        self.events: list[Json] = []
        self.started = threading.Event()
        self._api = api
        self._prompt = prompt
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="streamed")
        self._done = self._pool.submit(self._read)

    def _read(self) -> None:
        for event in self._api.stream("/v1/completions", completion_body(self._prompt, NUM_TOKENS)):
            self.events.append(event)
            if len(self.events) == 10:
                self.started.set()
        self.started.set()

    @property
    def ended(self) -> bool:
        """No more events will come."""
        return self._done.done()

    def finish(self, timeout_s: float) -> list[Json]:
        """All events; fails if the stream does not end."""
        self._done.result(timeout_s)
        self._pool.shutdown()
        return self.events


def _half_meshes(stack: ExitStack, model_dir: Path, hold_s: float) -> tuple[ExpertProcess, Server]:
    """A mesh of two expert workers with half of the experts each; the second one and a gateway."""
    first, second = start_expert_workers(model_dir, ["0/2", "1/2"])
    stack.callback(first.process.close)
    stack.callback(second.process.close)
    addresses = [first.address, second.address]
    return second, stack.enter_context(_mesh(model_dir, addresses, hold_s=hold_s))


def _wait_stalled(stream: Streamed) -> None:
    """Waits until the stream has brought nothing for half a second."""
    seen = [(len(stream.events), time.monotonic())]

    def stalled() -> bool:
        count, since = seen[-1]
        if len(stream.events) != count:
            seen.append((len(stream.events), time.monotonic()))
        return time.monotonic() - since > 0.5

    poll(stalled, timeout_s=10, what="the stream pauses")
    assert not stream.ended, "the test came too late: choose more tokens"


def test_holder_that_hangs_or_dies_comes_back(
    model_dir: Path, prompt: list[int], expected: tuple[int, ...]
) -> None:
    """While the only holder of experts is stopped, or killed until its restart, a stream pauses;
    then it goes on with the same tokens.
    """
    with ExitStack() as stack:
        second, server = _half_meshes(stack, model_dir, LONG_HOLD_S)
        stream = Streamed(server.api, prompt)
        assert stream.started.wait(20)
        hung = psutil.Process(second.process.process.pid)
        hung.suspend()
        try:
            _wait_stalled(stream)
            assert server.api.get("/health").status == 200
        finally:
            hung.resume()
        progress = len(stream.events)
        poll(lambda: len(stream.events) > progress + 5, timeout_s=10, what="the stream goes on")
        second.process.kill()
        _wait_stalled(stream)
        poll(lambda: server.api.ready().status == 503, timeout_s=5, what="/ready is 503")
        stack.enter_context(expert_worker(model_dir, experts="1/2", port=second.port))
        events = stream.finish(30)
        assert "error" not in events[-1], events[-1]
        assert expected == tokens_of_events(events)
        assert expected == server.api.complete(prompt, NUM_TOKENS).token_ids


def test_killed_holder_stays_away(
    model_dir: Path, prompt: list[int], expected: tuple[int, ...]
) -> None:
    """Without a restart the stream ends soon, with a named error after correct tokens."""
    with ExitStack() as stack:
        second, server = _half_meshes(stack, model_dir, SHORT_HOLD_S)
        stream = Streamed(server.api, prompt)
        assert stream.started.wait(20)
        second.process.kill()
        events = stream.finish(SHORT_HOLD_S + 10)
        assert events[-1]["error"]["code"] == "expert_unavailable", events[-1]
        tokens = tokens_of_events(events[:-1])
        assert 0 < len(tokens) < NUM_TOKENS
        assert expected[: len(tokens)] == tokens
        metrics = server.api.metrics()
        assert metrics["moe_kv_blocks_used"] == metrics["moe_request_slots_used"] == 0
        assert metrics["moe_uncovered_experts"] == 4 * MIXTRAL.num_layers


def test_serve_restarts_an_expert_worker(
    model_dir: Path, prompt: list[int], expected: tuple[int, ...]
) -> None:
    """`expertmesh serve` replaces an expert worker that died; the running stream goes on.

    The start of the next one stays behind the others for the cores, but then it serves with the
    priority of its neighbours.
    """
    with serve(model_dir, "--experts-hold-s", str(LONG_HOLD_S), expert_workers=2) as server:
        stream = Streamed(server.api, prompt)
        assert stream.started.wait(20)
        victims = [
            process
            for process in server.process.descendants()
            if "expert_worker" in process.cmdline()
        ]
        assert len(victims) == 2
        victims[0].kill()
        poll(lambda: bool(_started_again(server)), timeout_s=10, what="it is started again")
        events = stream.finish(60)
        assert expected == tokens_of_events(events), events[-1]
        (second,) = _started_again(server)
        nicenesses = _nicenesses(second)
        assert nicenesses[second.pid] == os.getpriority(os.PRIO_PROCESS, 0)
        assert max(nicenesses.values()) < LOWEST_PRIORITY  # that of the start, which is over


def _started_again(server: Server) -> list[psutil.Process]:
    """Expert workers that `serve` has started behind the others."""
    return [
        process
        for process in processes_of(server.process.marker)
        if "--start-niceness" in process.cmdline()
    ]


def _nicenesses(process: psutil.Process) -> dict[int, int]:
    """Of the threads of a process, by number; the main thread has that of the process."""
    return {thread.id: os.getpriority(os.PRIO_PROCESS, thread.id) for thread in process.threads()}


@pytest.mark.slow
def test_expert_worker_of_another_model_is_not_used(
    models: Models, model_dir: Path, prompt: list[int], expected: tuple[int, ...]
) -> None:
    """An expert worker with other weights or another dtype is named incompatible, never asked."""
    other_model = models.tiny(replace(MIXTRAL, seed=99))
    with (
        expert_worker(model_dir) as right,
        expert_worker(other_model) as other,
        expert_worker(model_dir, dtype="bfloat16") as coarse,
        _mesh(model_dir, [other.address, right.address, coarse.address]) as server,
    ):

        def both_named() -> bool:
            status = server.api.ready().json
            states = [_worker_at(status, each.address)["state"] for each in (other, coarse)]
            return states == ["incompatible", "incompatible"]

        poll(both_named, timeout_s=5, what="both are incompatible")
        status = server.api.ready().json
        assert other_model.name in _worker_at(status, other.address)["message"]
        assert "bfloat16" in _worker_at(status, coarse.address)["message"]
        assert _worker_at(status, right.address)["state"] == "ready"
        assert _worker_at(status, right.address)["num_experts"] == 8 * MIXTRAL.num_layers
        assert _uncovered(status) == {}
        assert expected == server.api.complete(prompt, NUM_TOKENS).token_ids
        assert watch_once(other.address).load.calls == 0
        assert watch_once(coarse.address).load.calls == 0
