"""Expert workers start empty, and a gateway has experts loaded, copied, moved and handed over."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.conftest import Models
from tests.support.api import Json
from tests.support.mesh import COMMAND, Server, expert_workers, gateway
from tests.support.oracle import prompts
from tests.support.processes import Managed, free_port, poll
from tests.support.tiny_checkpoints import MIXTRAL

pytestmark = pytest.mark.alone

NUM_TOKENS, MANY_TOKENS = 40, 300
NUM_PAIRS = MIXTRAL.num_layers * 8


@pytest.fixture(scope="module")
def model_dir(models: Models) -> Path:
    """A tiny Mixtral of 8 experts."""
    return models.tiny(MIXTRAL)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    """A prompt of this model."""
    return prompts(MIXTRAL.vocab_size, [20], seed=8)[0]


@pytest.fixture(scope="module")
def expected(models: Models, model_dir: Path, prompt: list[int]) -> tuple[int, ...]:
    """Its greedy continuation in transformers."""
    return models.oracle(model_dir).greedy(prompt, NUM_TOKENS).token_ids


@contextmanager
def led(model_dir: Path, addresses: Sequence[str], *flags: str) -> Iterator[Server]:
    """A gateway that leads."""
    with gateway(model_dir, addresses, *flags, placement="auto") as server:
        yield server


def placement(server: Server) -> Json:
    """What an operator sees."""
    answer = server.api.get("/admin/placement")
    assert answer.status == 200
    return answer.json


def wait_placed(server: Server, num_workers: int, fewest_copies: int = 2) -> Json:
    """Waits until so many expert workers hold what is planned."""

    def is_placed() -> bool:
        report = placement(server)
        return (
            len(report["workers"]) == num_workers
            and report["fewest_copies"] == fewest_copies
            and not report["plan"]["moves"]
        )

    poll(is_placed, timeout_s=40, what=f"experts are on {num_workers} expert workers")
    return placement(server)


def _num_generated(server: Server) -> float:
    return server.api.metrics()["moe_generation_tokens_total"]


def test_empty_expert_workers_are_filled(
    model_dir: Path, prompt: list[int], expected: tuple[int, ...]
) -> None:
    """Two copies of each expert, evenly; one that ends hands over first, and one that comes takes
    its share; a second gateway only follows until the first is gone."""
    port = free_port()
    with ExitStack() as stack:
        first, second = stack.enter_context(expert_workers(model_dir, ["none", "none"]))
        addresses = [first.address, second.address, f"127.0.0.1:{port}"]
        leader = stack.enter_context(led(model_dir, addresses))
        report = wait_placed(leader, 2)
        assert (report["leader"], report["num_covered"]) == (True, NUM_PAIRS)
        assert leader.api.complete(prompt, NUM_TOKENS).token_ids == expected

        (third,) = stack.enter_context(expert_workers(model_dir, ["none"], port=port))
        report = wait_placed(leader, 3)
        held = [sum(map(len, worker["resident"].values())) for worker in report["workers"]]
        assert max(held) - min(held) <= MIXTRAL.num_layers
        assert leader.api.complete(prompt, NUM_TOKENS).token_ids == expected

        with led(model_dir, addresses) as follower:
            assert placement(follower)["leader"] is False
            assert follower.api.post("/admin/placement/rebalance", {}).status == 409
            assert follower.api.complete(prompt, NUM_TOKENS).token_ids == expected

            second.process.process.send_signal(signal.SIGTERM)
            assert second.process.process.wait(30) == 0
            report = wait_placed(leader, 2)
            assert leader.api.complete(prompt, NUM_TOKENS).token_ids == expected
            assert leader.api.ready().status == follower.api.ready().status == 200

            assert leader.process.stop(10) == 0
            poll(
                lambda: placement(follower)["leader"] is True, timeout_s=10, what="the other leads"
            )
            first.process.kill()
            poll(
                lambda: (
                    follower.api.ready().status == 200 and len(placement(follower)["workers"]) == 1
                ),
                timeout_s=20,
                what="one expert worker serves all",
            )
            assert follower.api.complete(prompt, NUM_TOKENS).token_ids == expected
            assert third.process.process.poll() is None


def test_the_only_copy_comes_back_elsewhere(
    models: Models, model_dir: Path, prompt: list[int]
) -> None:
    """With one copy of each expert, those of a killed expert worker are loaded by the other while
    requests wait: none fails, and none gets other tokens."""
    expected_many = models.oracle(model_dir).greedy(prompt, MANY_TOKENS).token_ids
    with expert_workers(model_dir, ["none", "none"]) as (first, second):
        flags = ("--min-copies", "1", "--experts-hold-s", "60")
        with led(model_dir, [first.address, second.address], *flags) as server:
            report = wait_placed(server, 2, fewest_copies=1)
            assert report["num_copies"] == NUM_PAIRS
            with ThreadPoolExecutor(1) as pool:
                completion = pool.submit(server.api.complete, prompt, MANY_TOKENS)
                poll(lambda: _num_generated(server) > 5, timeout_s=20, what="tokens come")
                first.process.kill()
                tokens = completion.result(60).token_ids
            assert tokens == expected_many
            report = wait_placed(server, 1, fewest_copies=1)
            assert report["workers"][0]["worker_id"] == second.state().worker_id


def test_a_leader_that_is_killed_is_followed(
    model_dir: Path, prompt: list[int], expected: tuple[int, ...]
) -> None:
    """kill -9 in the middle of the first loads: the other gateway goes on from what is there."""
    with ExitStack() as stack:
        workers = stack.enter_context(expert_workers(model_dir, ["none"] * 3))
        addresses = [worker.address for worker in workers]
        argv = [*COMMAND, "gateway", str(model_dir), "--dtype", "float32", "--port", "0"]
        argv += ["--grpc-port", "0", "--experts", ",".join(addresses)]
        with Managed(argv, name="leader") as leader:
            poll(lambda: any(w.state().layers for w in workers), timeout_s=40, what="it leads")
            leader.kill()
        follower = stack.enter_context(led(model_dir, addresses))
        report = wait_placed(follower, 3)
        assert report["token"] == 2
        assert report["num_copies"] == 2 * NUM_PAIRS
        assert follower.api.complete(prompt, NUM_TOKENS).token_ids == expected
