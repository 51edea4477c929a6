"""A gateway with two attention workers: real processes, one of them killed under load."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from expertmesh.settings import (
    EngineSettings,
    GatewaySettings,
    HttpSettings,
    MeshSettings,
    ModelSettings,
)
from gateway.sequence import SamplingParams
from gateway.server import Gateway
from tests.support.oracle import prompts
from tests.support.tiny_checkpoints import MIXTRAL

if TYPE_CHECKING:
    from tests.conftest import Models

NUM_REQUESTS = 12
PROMPTS = prompts(MIXTRAL.vocab_size, [3 + 5 * index for index in range(NUM_REQUESTS)], seed=5)
GREEDY = SamplingParams(max_tokens=150, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(
    max_tokens=150,
    temperature=0.9,
    top_p=0.95,
    seed=7,
    repetition_penalty=1.1,
    frequency_penalty=0.2,
    ignore_eos=True,
)
START_S = 120.0


@pytest.fixture
async def gateway(models: Models) -> AsyncIterator[Gateway]:
    """Colocated, on free ports."""
    made = Gateway(
        GatewaySettings(
            http=HttpSettings(port=0, grpc_port=0),
            model=ModelSettings(model=str(models.tiny(MIXTRAL))),
            engine=EngineSettings(kv_cache_tokens=4096, max_num_seqs=16),
            mesh=MeshSettings(experts="local", attention_workers=2),
        )
    )
    try:
        await asyncio.wait_for(made.start(), START_S)
        yield made
    finally:
        await made.stop()


async def ask(
    gateway: Gateway, name: str, index: int, begun: asyncio.Event | None = None
) -> list[int]:
    """Tokens of a request; odd ones are sampled. Sets `begun` with the first token."""
    assert gateway.frontend is not None
    params = SAMPLED if index % 2 else GREEDY
    token_ids: list[int] = []
    async for output in gateway.frontend.generate(name, PROMPTS[index], params):
        token_ids += output.token_ids
        if begun is not None:
            begun.set()
    return token_ids


async def test_requests_outlive_an_attention_worker(gateway: Gateway) -> None:
    """All share the load; after one is killed its requests pause and get the tokens that they get
    alone, sampling state included; the other one's are not touched."""
    assert gateway.frontend is not None
    assert gateway.attention is not None
    alone = [await ask(gateway, f"alone-{index}", index) for index in range(NUM_REQUESTS)]
    killed, spared = gateway.attention.pids
    begun = [asyncio.Event() for _ in range(NUM_REQUESTS)]
    asking = [
        asyncio.create_task(ask(gateway, f"together-{index}", index, begun[index]))
        for index in range(NUM_REQUESTS)
    ]
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), START_S)
    assert not all(task.done() for task in asking), "the test came too late: choose more tokens"
    os.kill(killed, signal.SIGKILL)
    assert await asyncio.wait_for(asyncio.gather(*asking), START_S) == alone
    assert spared in gateway.attention.pids
    assert killed not in gateway.attention.pids
    assert len(gateway.attention.pids) == 2
    assert gateway.frontend.stats().request_slots_used == 0
