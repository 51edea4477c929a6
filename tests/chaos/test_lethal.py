"""One request whose rows end each expert worker that computes them, among others that go on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from tests.chaos.harness.checks import longest_gap_s, wait_idle
from tests.chaos.harness.load import Load
from tests.chaos.harness.mesh import NUM_COPIES, NUM_WORKERS, Mesh, mesh_at
from tests.chaos.harness.pool import Revival, expert_pool, shares_with_copies
from tests.chaos.harness.streams import Workload
from tests.chaos.harness.suffering import NUM_STREAMS, RUNNING_TOKENS, Traffic, judge
from tests.chaos.harness.table import Row
from tests.support.api import Answer
from tests.support.processes import poll
from tests.support.tiny_checkpoints import MIXTRAL

pytestmark = [pytest.mark.alone, pytest.mark.chaos, pytest.mark.timeout(900)]

PROGRAM = ("-m", "tests.chaos.harness.mortal_expert_worker")
POISON = 1
"""A token that is in no other prompt, and in no answer."""
TIMES = 3
MOST_DEATHS = 4
"""For one request: two with the first step, one more if the second of these was noticed late, and
the one that convicts it."""
QUARANTINED = "moe_requests_quarantined_total"


@pytest.fixture(scope="module")
def lethal_model(tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In which one token makes rows that have a large first element."""
    folder = shutil.copytree(tiny_mixtral, tmp_path_factory.mktemp("lethal") / "model")
    tensors = load_file(folder / "model.safetensors")
    embedding_H = tensors["model.embed_tokens.weight"][POISON]
    embedding_H[:] = 0.0
    embedding_H[0] = 1e4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def lethal_traffic(lethal_model: Path) -> Traffic:
    """Requests without that token."""
    return Traffic.to(lethal_model, Workload(MIXTRAL.vocab_size, first_token=POISON + 1))


@pytest.fixture(scope="module")
def mortal_mesh(lethal_model: Path) -> Iterator[Mesh]:
    """Three expert workers that such a row ends, with two copies of each expert."""
    shares = shares_with_copies(MIXTRAL.num_experts, NUM_WORKERS, NUM_COPIES)
    flags = ("--dtype", "float32")
    with (
        expert_pool(lethal_model, shares, flags, program=PROGRAM) as workers,
        mesh_at(lethal_model, workers, [worker.address for worker in workers]) as mesh,
    ):
        yield mesh


def ask_for_death(mesh: Mesh, request_id: str) -> Answer:
    """The answer to a request with that token, once all expert workers are there again."""
    body = {"prompt": [5, 6, POISON, 7], "max_tokens": 4, "request_id": request_id}
    answer = mesh.api.post("/v1/completions", body)
    mesh.wait_all_ready()
    return answer


def test_lethal_request(mortal_mesh: Mesh, lethal_traffic: Traffic, table: list[Row]) -> None:
    """It is ended with an error of its own; no other fails, and no token changes."""
    row = Row("a request kills whoever computes it", times=TIMES)
    table.append(row)
    with (
        Revival(mortal_mesh.workers) as revival,
        Load([mortal_mesh.api.port], lethal_traffic.workload, NUM_STREAMS) as load,
    ):
        for turn in range(TIMES):
            load.wait_tokens(RUNNING_TOKENS)
            answer = ask_for_death(mortal_mesh, f"poison{turn}")
            assert (answer.status, answer.error["code"]) == (500, "request_quarantined")
            assert answer.headers["x-should-retry"] == "false"
            assert mortal_mesh.api.metrics()[QUARANTINED] == turn + 1
            assert f"quarantined request cmpl-poison{turn}-0" in mortal_mesh.server.process.stderr
        load.wait_tokens(RUNNING_TOKENS)
        streams = load.finish()
    wait_idle(mortal_mesh.api)
    row.note = f"{revival.num_deaths / TIMES:.1f} expert workers died each time"
    row.stalls_s.append(longest_gap_s(streams))
    judge([stream for stream in streams if stream.status != 503], lethal_traffic.expected, row)
    assert 3 * TIMES <= revival.num_deaths <= MOST_DEATHS * TIMES


def test_deaths_by_chance(mortal_mesh: Mesh, lethal_traffic: Traffic, table: list[Row]) -> None:
    """Two and three expert workers are killed at one moment: nobody is taken for the reason."""
    row = Row("kill -9 of 2 and 3 of 3 at a moment", times=2 * TIMES)
    table.append(row)
    before = mortal_mesh.api.metrics().get(QUARANTINED, 0.0)
    with (
        Revival(mortal_mesh.workers) as revival,
        Load([mortal_mesh.api.port], lethal_traffic.workload, NUM_STREAMS) as load,
    ):
        for num_victims in (2, 3) * TIMES:
            load.wait_tokens(RUNNING_TOKENS)
            kill_at_once(mortal_mesh, num_victims, revival)
        load.wait_tokens(RUNNING_TOKENS)
        streams = load.finish()
    wait_idle(mortal_mesh.api)
    judge([stream for stream in streams if stream.status != 503], lethal_traffic.expected, row)
    assert mortal_mesh.api.metrics().get(QUARANTINED, 0.0) == before


def kill_at_once(mesh: Mesh, num_victims: int, revival: Revival) -> None:
    """Kills some expert workers; returns when all serve again."""
    num_deaths = revival.num_deaths + num_victims
    for worker in mesh.workers[:num_victims]:
        worker.kill()
    poll(lambda: revival.num_deaths == num_deaths, timeout_s=10.0, what="they have died")
    mesh.wait_all_ready()
