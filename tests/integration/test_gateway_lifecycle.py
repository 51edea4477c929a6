"""A gateway inside the test's process, with a real attention worker: start, loss, stop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest

from expertmesh.errors import PortError
from expertmesh.settings import (
    EngineSettings,
    GatewaySettings,
    HttpSettings,
    MeshSettings,
    ModelSettings,
)
from gateway import life, server
from gateway.attention.client import AttentionClient
from gateway.listen import bind
from gateway.sequence import RequestOutput, SamplingParams
from gateway.service import GenerationFrontend
from tests.support.tiny_checkpoints import MIXTRAL

if TYPE_CHECKING:
    from tests.conftest import Models

pytestmark = pytest.mark.alone

START_S = 120.0
OURS = ("engine", "membership", "watch-", "attention-", "tokenize", "compile")


def settings(model: Path, *, port: int = 0) -> GatewaySettings:
    """A colocated gateway on free ports."""
    return GatewaySettings(
        http=HttpSettings(port=port, grpc_port=0),
        model=ModelSettings(model=str(model), dtype="float32"),
        engine=EngineSettings(kv_cache_tokens=1024, max_num_seqs=4, drain_grace_s=0.1),
        mesh=MeshSettings(experts="local"),
    )


def our_threads() -> list[str]:
    """Names of threads that a gateway starts."""
    return [t.name for t in threading.enumerate() if t.name.startswith(OURS)]


def parts(gateway: server.Gateway) -> tuple[GenerationFrontend, AttentionClient]:
    """The parts of a started gateway that the tests talk to."""
    frontend, group = gateway.frontend, gateway.attention
    assert frontend is not None
    assert group is not None
    (attention,) = group
    return frontend, attention


async def ask(frontend: GenerationFrontend, name: str, max_tokens: int) -> list[RequestOutput]:
    """All outputs of a greedy request."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return [output async for output in frontend.generate(name, [3, 4, 5], params)]


def tokens_of(outputs: Sequence[RequestOutput]) -> list[int]:
    """The tokens of an answer."""
    return [token_id for output in outputs for token_id in output.token_ids]


def num_accepted(frontend: GenerationFrontend) -> int:
    """Requests that the engine has taken and not ended. With a stopped attention worker the second
    may wait for good: no more than two steps are in flight."""
    load = frontend.stats()
    return load.num_running + load.num_waiting


async def until(condition: Callable[[], bool], within_s: float = START_S) -> None:
    """Returns once the condition holds."""
    met = asyncio.Event()

    def look() -> None:
        if condition():
            met.set()
        else:
            asyncio.get_running_loop().call_later(0.002, look)

    look()
    await asyncio.wait_for(met.wait(), within_s)


async def test_a_gateway_starts_serves_and_leaves_nothing(models: Models) -> None:
    """Answers come; while the attention worker is restarted new requests wait and the running one
    pauses, and both get the tokens that they would have got; in the end no thread, child or file is
    left."""
    gateway = server.Gateway(settings(models.tiny(MIXTRAL)))
    try:
        await asyncio.wait_for(gateway.start(), START_S)
        frontend, attention = parts(gateway)
        before = await ask(frontend, "a", 400)
        pid = attention.pid
        assert pid is not None
        running = asyncio.create_task(ask(frontend, "b", 400))
        await until(lambda: frontend.stats().num_running == 1)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not frontend.ready)
        meanwhile = asyncio.create_task(ask(frontend, "c", 400))
        await until(lambda: frontend.ready)
        assert attention.pid != pid
        assert tokens_of(await asyncio.wait_for(running, START_S)) == tokens_of(before)
        assert tokens_of(await asyncio.wait_for(meanwhile, START_S)) == tokens_of(before)
    finally:
        started_s = time.monotonic()
        await gateway.stop()
    assert time.monotonic() - started_s < 3.0
    assert our_threads() == []


async def test_requests_that_a_stop_ends_are_told_so(models: Models) -> None:
    """A whole answer is 503 with the time after which to try again; a stream has the same error."""
    gateway = server.Gateway(settings(models.tiny(MIXTRAL)))
    body = {"prompt": [1, 2], "max_tokens": 500, "ignore_eos": True}
    try:
        await asyncio.wait_for(gateway.start(), START_S)
        frontend, attention = parts(gateway)
        assert attention.pid is not None
        os.kill(attention.pid, signal.SIGSTOP)  # so that no answer is done before the stop
        url = f"http://127.0.0.1:{gateway.info['http_port']}/v1/completions"
        async with aiohttp.ClientSession() as session:
            whole = asyncio.create_task(session.post(url, json=body))
            stream = asyncio.create_task(session.post(url, json={**body, "stream": True}))
            await until(lambda: num_accepted(frontend) == 2)
            stopping = asyncio.create_task(gateway.stop())
            await until(lambda: not frontend.accepting)
            os.kill(attention.pid, signal.SIGCONT)
            await stopping
            refused = await whole
            assert (refused.status, refused.headers["Retry-After"]) == (503, "5")
            for answer in (refused, await stream):
                text = await answer.text()
                assert '"the gateway is stopping"' in text
                assert '"engine_overloaded"' in text
    finally:
        await gateway.stop()


async def test_a_gateway_can_be_stopped_while_it_starts(models: Models) -> None:
    """A stop during the start of the attention worker ends the child and the start."""
    gateway = server.Gateway(settings(models.tiny(MIXTRAL)))
    stopping = asyncio.Event()
    starting = asyncio.create_task(life.start_unless(gateway, stopping))
    await until(lambda: gateway.attention is not None and bool(gateway.attention.pids))
    started_s = time.monotonic()
    stopping.set()
    assert not await asyncio.wait_for(starting, 5.0)
    await gateway.stop()
    assert time.monotonic() - started_s < 5.0
    assert our_threads() == []


async def test_a_port_in_use_is_found_before_anything_is_started(models: Models) -> None:
    """Nothing slow happens first: no child was started when the error comes."""
    other = bind("--port", "127.0.0.1", 0)
    with other:
        other.listen()
        gateway = server.Gateway(settings(models.tiny(MIXTRAL), port=other.getsockname()[1]))
        with pytest.raises(PortError, match="Address already in use"):
            await gateway.start()
        await gateway.stop()
    assert gateway.attention is None
