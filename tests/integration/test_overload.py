"""Far more work than fits: everything ends, nothing leaks, and no token depends on the load.

Requests of every kind come at once, some of whose clients go away, on a KV cache that holds a third
of them at most. Each must be answered with just what it is answered with when it is alone, also if
the attention worker is killed meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.api import Api
from tests.support.mesh import Server, serve
from tests.support.mixed_load import (
    MixedRequest,
    Outcome,
    ask_all,
    ask_one_by_one,
    check_equal,
    client,
    mixed_request,
)
from tests.support.processes import poll, processes_of, stopped

NUM_QUICK, NUM_ALL = 48, 200
KV_TOKENS = 640
"""Of the KV cache: the prompts of some twenty requests."""
MAX_TOKENS = 80
"""Of an output: what begins to run together does not fit to its end."""


@pytest.fixture(
    scope="module", params=[NUM_QUICK, pytest.param(NUM_ALL, marks=pytest.mark.slow)], ids=str
)
def requests(request: pytest.FixtureRequest) -> list[MixedRequest]:
    """The load."""
    return [
        mixed_request(number, max_prompt=30, max_tokens=MAX_TOKENS)
        for number in range(request.param)
    ]


@contextmanager
def overloaded(model: Path, *flags: str) -> Iterator[Server]:
    """A mesh with a KV cache that is too small."""
    small = ("--kv-cache-tokens", str(KV_TOKENS), "--kv-block-size", "4", "--max-num-seqs", "48")
    with serve(model, *small, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def alone(text_model: Path, requests: Sequence[MixedRequest]) -> list[Outcome]:
    """What each is answered when nothing else runs, without a prefix cache."""
    with overloaded(text_model) as server:
        return _ask_alone(server, requests)


def _ask_alone(server: Server, requests: Sequence[MixedRequest]) -> list[Outcome]:
    return asyncio.run(_alone(server.api.port, requests))


async def _alone(port: int, requests: Sequence[MixedRequest]) -> list[Outcome]:
    async with client(port) as session:
        return await ask_one_by_one(session, requests)


async def _together(port: int, requests: Sequence[MixedRequest]) -> list[Outcome]:
    async with client(port) as session:
        return await ask_all(session, requests)


def check_nothing_is_held(api: Api) -> None:
    """Fails unless requests, blocks and slots are gone a moment after the last answer."""

    def idle() -> bool:
        metrics = api.metrics()
        names = ("num_requests_running", "num_requests_waiting", "request_slots_used")
        return not any(metrics[f"moe_{name}"] for name in (*names, "kv_blocks_used"))

    poll(idle, timeout_s=10.0, what="nothing is held")


def check_all(
    outcomes: Sequence[Outcome], alone: Sequence[Outcome], requests: Sequence[MixedRequest]
) -> None:
    """Each has what it has when it is alone, as far as its client read it."""
    for outcome, expected, request in zip(outcomes, alone, requests, strict=True):
        check_equal(outcome, expected, request)


def test_overload(text_model: Path, requests: list[MixedRequest]) -> None:
    """All at once: preemptions and reuse of prefixes happen, and change nothing. Then again, with
    kill -9 of the attention worker in the middle: clients see a pause, and the same tokens."""
    with overloaded(text_model) as server:
        alone = _ask_alone(server, requests)
        _ask_everything_at_once(server, requests, alone)
        _lose_attention_worker(server, requests, alone)


def _ask_everything_at_once(
    server: Server, requests: list[MixedRequest], alone: list[Outcome]
) -> None:
    before = server.api.metrics()
    num_tokens = sum(
        len(token_ids) for outcome in alone for token_ids, _, _ in outcome.choices.values()
    )
    assert num_tokens > KV_TOKENS, "the outputs alone fit: the test shows nothing"
    outcomes = asyncio.run(_while_nothing_is_computed(server, requests))
    check_all(outcomes, alone, requests)
    check_nothing_is_held(server.api)
    after = server.api.metrics()
    for name in ("num_preemptions_total", "prefix_cache_hits_total"):
        assert after[f"moe_{name}"] > before[f"moe_{name}"], f"{name}: the test shows nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--num-speculative-tokens", "4"), id="drafts"),
        pytest.param(("--no-prefix-caching",), id="no cache"),
        pytest.param(("--no-async-scheduling",), id="one step"),
        pytest.param(("--attention-workers", "2"), id="two"),
    ],
)
def test_loss_however_it_is_served(
    text_model: Path, requests: list[MixedRequest], alone: list[Outcome], flags: tuple[str, ...]
) -> None:
    """kill -9 in the middle, with other settings."""
    with overloaded(text_model, *flags) as server:
        _lose_attention_worker(server, requests, alone)


def _lose_attention_worker(
    server: Server, requests: list[MixedRequest], alone: list[Outcome]
) -> None:
    victim = _attention_worker(server)
    outcomes = asyncio.run(_kill_meanwhile(server, victim, requests))
    check_all(outcomes, alone, requests)
    check_nothing_is_held(server.api)
    assert _attention_worker(server).pid != victim.pid


async def _while_nothing_is_computed(
    server: Server, requests: Sequence[MixedRequest]
) -> list[Outcome]:
    """All requests are there before any is computed, however quick the server is."""
    with stopped(_attention_worker(server)):
        load = asyncio.create_task(_together(server.api.port, requests))
        await asyncio.to_thread(
            poll,
            lambda: _num_unfinished(server.api) >= len(requests),
            timeout_s=20.0,
            what="all requests are there",
        )
    return await load


async def _kill_meanwhile(
    server: Server, victim: psutil.Process, requests: Sequence[MixedRequest]
) -> list[Outcome]:
    load = asyncio.create_task(_together(server.api.port, requests))
    await asyncio.to_thread(
        poll, lambda: _num_running(server.api) > 2, timeout_s=20.0, what="requests run"
    )
    victim.kill()
    return await load


def _num_unfinished(api: Api) -> float:
    metrics = api.metrics()
    return metrics["moe_num_requests_running"] + metrics["moe_num_requests_waiting"]


def _num_running(api: Api) -> float:
    return api.metrics()["moe_num_requests_running"]


def _attention_worker(server: Server) -> psutil.Process:
    """The oldest one."""
    processes = processes_of(server.process.marker)
    found = [process for process in processes if "attention_worker" in process.cmdline()]
    return min(found, key=psutil.Process.create_time)
