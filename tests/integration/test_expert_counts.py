"""Counts of experts of a real mesh: exactly what requests are told, also after a loss."""

from __future__ import annotations

import base64
import io
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import Models
from tests.support.api import Api, Json
from tests.support.mesh import expert_workers, gateway, serve
from tests.support.oracle import prompts
from tests.support.processes import poll
from tests.support.tiny_checkpoints import MIXTRAL

pytestmark = pytest.mark.alone

NUM_TOKENS = 120
LONG_NUM_TOKENS = 440
"""Of requests that are to run still when an expert worker stops."""
PROMPTS = prompts(MIXTRAL.vocab_size, [5, 17, 33, 8], seed=21)
"""They have no beginning in common: nothing is found in the prefix cache, all is computed."""
SHAPE = MIXTRAL.num_layers, MIXTRAL.num_experts
TOLD_WITHIN_S = 20.0
"""An attention worker tells twice a second, on a quiet machine."""


@pytest.fixture(scope="module")
def model_dir(models: Models) -> Path:
    """A tiny Mixtral: 3 layers, 8 experts, top-2."""
    return models.tiny(MIXTRAL)


def _routed(api: Api, prompt: list[int], num_tokens: int = NUM_TOKENS) -> npt.NDArray[np.int64]:
    """Generates, and counts the experts that the answer tells of."""
    body = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_routed_experts": True,
    }
    answer = api.post("/v1/completions", body)
    assert answer.status == 200, answer.body
    packed = base64.b64decode(answer.json["choices"][0]["routed_experts"])
    ids_TLK = np.load(io.BytesIO(packed))
    return np.stack(
        [np.bincount(ids_TLK[:, layer].ravel(), minlength=SHAPE[1]) for layer in range(SHAPE[0])]
    )


def _use(api: Api) -> Json:
    answer = api.get("/v1/moe/experts?window=all")
    assert answer.status == 200, answer.body
    return answer.json


def _check(api: Api, expected: npt.NDArray[np.int64]) -> None:
    """All counts come, no more than that, and Prometheus gets the same."""
    poll(
        lambda: np.sum(_use(api)["tokens"]) >= expected.sum(),
        timeout_s=TOLD_WITHIN_S,
        what="all counts are told",
    )
    time.sleep(1.0)  # what is counted twice might come later
    assert np.array_equal(_use(api)["tokens"], expected)
    text = api.get("/metrics/experts").body.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = [sample.value for sample in families["moe_expert_tokens"].samples]
    assert np.array_equal(np.reshape(samples, SHAPE), expected)


@pytest.mark.parametrize(
    ("num_workers", "flags"), [(2, ()), (0, ()), (0, ("--attention-workers", "2"))]
)
def test_counts_are_those_of_the_answers(
    model_dir: Path, num_workers: int, flags: tuple[str, ...]
) -> None:
    """With expert workers, and where one or two attention workers hold the experts themselves."""
    with (
        serve(model_dir, *flags, expert_workers=num_workers) as server,
        ThreadPoolExecutor(len(PROMPTS)) as pool,
    ):
        told = list(pool.map(lambda prompt: _routed(server.api, prompt), PROMPTS))
        _check(server.api, sum(told, np.zeros(SHAPE, np.int64)))


def test_rows_that_are_asked_again_count_once(model_dir: Path) -> None:
    """An expert worker stops answering while all requests run, so that its calls are hedged, and is
    killed then; another has copies of all it had."""
    with (
        expert_workers(model_dir, ["all", "all"]) as (lost, left),
        gateway(model_dir, [lost.address, left.address]) as server,
        ThreadPoolExecutor(len(PROMPTS)) as pool,
    ):
        api = server.api
        running = [pool.submit(_routed, api, prompt, LONG_NUM_TOKENS) for prompt in PROMPTS]
        poll(
            lambda: api.metrics()["moe_generation_tokens_total"] > 10 * len(PROMPTS),
            timeout_s=TOLD_WITHIN_S,
            what="all requests run",
        )
        psutil.Process(lost.process.process.pid).suspend()
        poll(
            lambda: _asked_again(api, lost.address) > 0,
            timeout_s=TOLD_WITHIN_S,
            what="its rows are asked of the other",
        )
        lost.process.kill()
        told = [one.result() for one in running]
        _check(api, sum(told, np.zeros(SHAPE, np.int64)))


def _asked_again(api: Api, address: str) -> int:
    """Calls to an expert worker whose rows were asked of others, too."""
    workers: list[Json] = api.get("/v1/moe/workers").json["workers"]
    (total,) = [worker["total"] for worker in workers if worker["address"] == address]
    assert sum(total["retries_by_cause"].values()) == total["retries"]
    return int(total["hedges"] + total["retries"])


def test_the_mesh_stops_while_somebody_watches(model_dir: Path) -> None:
    """The stream ends in order, before the processes do."""
    with serve(model_dir, expert_workers=0) as server:
        connection = server.api.connect()
        connection.request("GET", "/v1/moe/stream")
        response = connection.getresponse()
        assert response.readline().startswith(b'data: {"object":"moe.overview"')
        assert server.process.stop(20.0) == 0
        assert response.read().endswith(b"data: [DONE]\n\n")
        connection.close()
