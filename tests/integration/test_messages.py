"""Messages between the attention worker and the expert workers, counted on the wire.

Exactly one per layer, micro-batch and expert worker with rows, none elsewhere; a token row goes to
an expert worker once. What must be sent is computed from the gate of the transformers model.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from tests.conftest import Models
from tests.support.api import Api
from tests.support.counting_proxy import CountingProxy, SeenCall
from tests.support.mesh import ExpertProcess, expert_workers, gateway
from tests.support.oracle import Oracle, prompts
from tests.support.processes import poll
from tests.support.tiny_checkpoints import MIXTRAL

NUM_WORKERS = 3
CHUNK = 16
NUM_TOKENS = 12


@dataclass(frozen=True)
class CountedMesh:
    """A gateway whose expert workers are reached through counting proxies."""

    api: Api
    workers: list[ExpertProcess]
    proxies: list[CountingProxy]
    oracle: Oracle
    owner: npt.NDArray[np.int64]
    """[E] expert worker of each expert, the same in every layer."""

    def take(self) -> list[list[SeenCall]]:
        """Calls of each expert worker since the last take."""
        return [proxy.take() for proxy in self.proxies]


@pytest.fixture(scope="module")
def mesh(models: Models) -> Iterator[CountedMesh]:
    """Three expert workers, each behind a proxy, and a gateway with prefill chunks of 16."""
    model_dir = models.tiny(MIXTRAL)
    with ExitStack() as stack:
        shares = [f"{index}/{NUM_WORKERS}" for index in range(NUM_WORKERS)]
        workers = stack.enter_context(expert_workers(model_dir, shares))
        proxies = [stack.enter_context(CountingProxy(worker.address)) for worker in workers]
        server = stack.enter_context(
            gateway(
                model_dir,
                [proxy.address for proxy in proxies],
                *("--max-num-batched-tokens", str(CHUNK)),
            )
        )
        owner = np.full(MIXTRAL.num_experts, -1)
        for index, worker in enumerate(workers):
            for layer in worker.state().layers:
                owner[list(layer.resident)] = index
        yield CountedMesh(server.api, workers, proxies, models.oracle(model_dir), owner)


def _tokens_computed(mesh: CountedMesh, prompt: list[int], max_tokens: int) -> list[int]:
    """The tokens that went through the layers: all but the last one generated."""
    answer = mesh.api.complete(prompt, max_tokens)
    assert mesh.oracle.greedy(prompt, max_tokens).token_ids == answer.token_ids
    return [*prompt, *answer.token_ids[:-1]]


def _expected_rows(mesh: CountedMesh, token_ids: list[int]) -> list[list[list[tuple[int, ...]]]]:
    """[layer][worker][token]: the experts of the token on that expert worker, ascending."""
    table = []
    for routed_TK in mesh.oracle.routing(token_ids, MIXTRAL.top_k):
        table.append(
            [
                [
                    tuple(sorted(int(e) for e in experts if mesh.owner[e] == worker))
                    for experts in routed_TK
                ]
                for worker in range(NUM_WORKERS)
            ]
        )
    return table


def test_every_expert_has_one_owner(mesh: CountedMesh) -> None:
    """The shares i/3 cover every expert once, and sizes differ by one at most."""
    assert sorted(Counter(mesh.owner.tolist()).values()) == [2, 3, 3]
    for worker in mesh.workers:
        assert [layer.layer for layer in worker.state().layers] == list(range(MIXTRAL.num_layers))


def test_one_message_where_rows_were_routed_and_none_elsewhere(mesh: CountedMesh) -> None:
    """A request alone: each step sends each expert worker exactly the rows the gate gives it."""
    mesh.take()
    prompt = prompts(MIXTRAL.vocab_size, [21], seed=3)[0]
    token_ids = _tokens_computed(mesh, prompt, NUM_TOKENS)
    bounds = [0, CHUNK, len(prompt), *range(len(prompt) + 1, len(token_ids) + 1)]
    rows = _expected_rows(mesh, token_ids)
    calls = mesh.take()
    steps = sorted({call.step for seen in calls for call in seen})
    assert len(bounds) - 1 == len(steps)
    for worker, seen in enumerate(calls):
        expected = {
            (step, layer): [experts for experts in rows[layer][worker][start:end] if experts]
            for step, start, end in zip(steps, bounds, bounds[1:], strict=False)
            for layer in range(MIXTRAL.num_layers)
        }
        actual = Counter((call.step, call.layer) for call in seen)
        assert {key: 1 for key, sent in expected.items() if sent} == dict(actual)
        for call in seen:
            assert sorted(expected[call.step, call.layer]) == sorted(call.experts)
            assert call.attempt == 0


def test_some_expert_worker_is_left_out(mesh: CountedMesh) -> None:
    """One token has two experts: at least one of three expert workers gets no message."""
    mesh.take()
    mesh.api.complete(prompts(MIXTRAL.vocab_size, [1], seed=4)[0], 1)
    calls = mesh.take()
    for layer in range(MIXTRAL.num_layers):
        sent = [sum(call.layer == layer for call in seen) for seen in calls]
        assert sum(sent) in (1, 2)
        assert max(sent) == 1


def test_many_requests_at_once(mesh: CountedMesh) -> None:
    """However requests are batched, no message is sent twice and no row more than once."""
    before = [worker.state().load for worker in mesh.workers]
    mesh.take()
    chosen = prompts(MIXTRAL.vocab_size, (1, 5, 17, 30, 40, 9, 22, 16), seed=5)
    with ThreadPoolExecutor(len(chosen), thread_name_prefix="client") as pool:
        computed = list(pool.map(lambda one: _tokens_computed(mesh, one, NUM_TOKENS), chosen))
    calls = mesh.take()
    tables = [_expected_rows(mesh, token_ids) for token_ids in computed]
    for worker, seen in enumerate(calls):
        assert set(Counter(call.key for call in seen).values()) == {1}
        for layer in range(MIXTRAL.num_layers):
            expected = [experts for rows in tables for experts in rows[layer][worker] if experts]
            actual = [experts for call in seen if call.layer == layer for experts in call.experts]
            assert sorted(expected) == sorted(actual)
    for worker, seen, start in zip(mesh.workers, calls, before, strict=True):
        load = worker.state().load
        assert len(seen) == load.calls - start.calls
        assert sum(call.num_rows for call in seen) == load.rows - start.rows
        pairs = sum(len(experts) for call in seen for experts in call.experts)
        assert pairs == load.pairs - start.pairs
        assert start.errors == load.errors


def test_a_row_is_sent_once_to_an_expert_worker(mesh: CountedMesh) -> None:
    """Within a message no hidden state occurs twice, though a token may have two experts there."""
    mesh.take()
    mesh.api.complete(prompts(MIXTRAL.vocab_size, [16], seed=6)[0], 1)
    seen = [call for calls in mesh.take() for call in calls]
    assert any(len(experts) == 2 for call in seen for experts in call.experts)
    for call in seen:
        assert len(set(call.rows)) == call.num_rows


def test_metrics_count_what_was_sent(mesh: CountedMesh) -> None:
    """Calls, token rows and bytes in /metrics are those on the wire, within a second."""
    first = _settled(mesh)
    mesh.take()
    for prompt in prompts(MIXTRAL.vocab_size, (30, 8), seed=9):
        mesh.api.complete(prompt, 5)
    seen = [call for calls in mesh.take() for call in calls]
    rows = sum(call.num_rows for call in seen)
    pairs = sum(len(experts) for call in seen for experts in call.experts)
    row_bytes = 4 * MIXTRAL.hidden_size

    def as_counted() -> bool:
        counted = [now - then for now, then in zip(_dispatched(mesh), first, strict=True)]
        calls, tokens, payload = counted
        at_least = row_bytes * (rows + pairs)
        return calls == len(seen) and tokens == rows + pairs and at_least <= payload < 2 * at_least

    poll(as_counted, timeout_s=15, what=f"{len(seen)} calls, {rows}+{pairs} rows are counted")


def _settled(mesh: CountedMesh) -> tuple[float, float, float]:
    """The counts once those of earlier requests are in: unchanged for longer than they travel."""
    last, since_s = _dispatched(mesh), time.monotonic()

    def quiet() -> bool:
        nonlocal last, since_s
        if (now := _dispatched(mesh)) != last:
            last, since_s = now, time.monotonic()
        return time.monotonic() - since_s > 1.5

    poll(quiet, timeout_s=15, what="nothing more is counted")
    return last


def _dispatched(mesh: CountedMesh) -> tuple[float, float, float]:
    """Calls, token rows in both directions, payload bytes in both directions."""
    metrics = mesh.api.metrics()
    return (
        metrics.get("moe_dispatch_duration_seconds_count", 0.0),
        metrics.get("moe_dispatch_tokens_total", 0.0),
        metrics.get("moe_dispatch_bytes_total", 0.0),
    )
