"""What steps report besides tokens: log probabilities of prompts, and experts of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from attention_worker import prompt_logprobs
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import ExpertUnavailableError
from expertmesh.v1 import attention_service_pb2 as pb
from tests.support.flaky_experts import FlakyExperts
from tests.support.oracle import prompts
from tests.support.runner_driver import DrivenRequest, RunnerDriver, local_experts, make_runner
from tests.support.tiny_checkpoints import LLAMA, MIXTRAL

if TYPE_CHECKING:
    from tests.conftest import Models

PROMPT = prompts(MIXTRAL.vocab_size, [90])[0]
TOP = 4


@pytest.fixture
def mixtral(models: Models) -> Path:
    """A tiny Mixtral."""
    return models.tiny(MIXTRAL)


def _joined_logprobs(
    messages: list[pb.PromptLogprobs], start: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Own log probabilities, top ids and top log probabilities of adjacent messages."""
    own, ids, values = [], [], []
    for message in messages:
        assert message.start == start
        start += message.num_tokens
        shape = (message.num_tokens, message.num_top)
        own.append(np.frombuffer(message.logprobs, "<f4"))
        ids.append(np.frombuffer(message.top_ids, "<i4").reshape(shape))
        values.append(np.frombuffer(message.top_logprobs, "<f4").reshape(shape))
    return np.concatenate(own), np.concatenate(ids), np.concatenate(values)


@pytest.mark.parametrize(("chunk", "rows"), [(512, 64), (512, 7), (16, 64), (1, 64)])
def test_prompt_logprobs_match_transformers(
    models: Models, mixtral: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, rows: int
) -> None:
    """Across chunks of the prompt, whatever number of rows is looked at at a time."""
    monkeypatch.setattr(prompt_logprobs, "CHUNK_ROWS", rows)
    driver = RunnerDriver(make_runner(mixtral), chunk=chunk)
    driver.submit(PROMPT[:7], 6)
    request = driver.submit(PROMPT, 3, pb.SamplingSpec(num_prompt_logprobs=TOP))
    driver.run()
    own, ids, values = _joined_logprobs(request.prompt_logprobs)
    logits_TV = torch.from_numpy(models.oracle(mixtral).logits(PROMPT)[:-1])
    expected_TV = logits_TV.log_softmax(-1).numpy()
    positions = np.arange(len(PROMPT) - 1)
    np.testing.assert_allclose(own, expected_TV[positions, PROMPT[1:]], atol=1e-3)
    np.testing.assert_allclose(values, -np.sort(-expected_TV, axis=1)[:, :TOP], atol=1e-3)
    np.testing.assert_allclose(expected_TV[positions[:, None], ids], values, atol=1e-3)


def test_prompt_logprobs_may_come_without_the_most_likely(mixtral: Path) -> None:
    """Zero of those are asked for; a prompt of one token has none at all."""
    driver = RunnerDriver(make_runner(mixtral))
    zero = driver.submit(PROMPT[:5], 2, pb.SamplingSpec(num_prompt_logprobs=0))
    short = driver.submit(PROMPT[:1], 2, pb.SamplingSpec(num_prompt_logprobs=2))
    driver.run()
    [message] = zero.prompt_logprobs
    assert (message.start, message.num_tokens, message.num_top) == (1, 4, 0)
    assert len(message.logprobs) == 16
    assert not message.top_ids
    assert not short.prompt_logprobs


def test_recomputed_positions_come_again_with_the_same_bits(mixtral: Path) -> None:
    """After a new admission, where generated tokens follow the prompt."""
    driver = RunnerDriver(make_runner(mixtral), chunk=40)
    request = driver.submit(PROMPT, 5, pb.SamplingSpec(num_prompt_logprobs=TOP))
    for _ in range(5):
        driver.step()
    first = _joined_logprobs(request.prompt_logprobs)
    request.prompt_logprobs.clear()
    driver.preempt(request)
    driver.run()
    for before, after in zip(first, _joined_logprobs(request.prompt_logprobs), strict=True):
        assert before.tobytes() == after.tobytes()


def test_requests_beside_one_that_asks_keep_their_bits(mixtral: Path) -> None:
    """Logits of ordinary requests are those of a run without reports."""
    results: list[list[DrivenRequest]] = []
    for spec in (
        pb.SamplingSpec(),
        pb.SamplingSpec(num_prompt_logprobs=TOP, return_routed_experts=True),
    ):
        driver = RunnerDriver(make_runner(mixtral), chunk=16)
        ordinary = [driver.submit(PROMPT[at:40], 6) for at in (0, 9)]
        driver.submit(PROMPT, 6, spec)
        driver.run()
        results.append(ordinary)
    for plain, beside in zip(*results, strict=True):
        assert np.stack(plain.logits).tobytes() == np.stack(beside.logits).tobytes()
        assert not beside.prompt_logprobs
        assert not beside.routed_experts


def _experts(request: DrivenRequest) -> np.ndarray:
    """[tokens, layers, K] from messages that must be adjacent."""
    parts, start = [], 0
    for message in request.routed_experts:
        assert message.start == start
        start += message.num_tokens
        shape = (message.num_tokens, message.num_layers, message.top_k)
        parts.append(np.frombuffer(message.expert_ids, "<u2").reshape(shape))
    return np.concatenate(parts)


@pytest.mark.parametrize("chunk", [512, 16])
def test_routed_experts_are_those_of_transformers(
    models: Models, mixtral: Path, chunk: int
) -> None:
    """Of every token but the last one, in the order of positions, in the order of layers."""
    driver = RunnerDriver(make_runner(mixtral), chunk=chunk)
    driver.submit(PROMPT[:9], 12)
    request = driver.submit(PROMPT, 8, pb.SamplingSpec(return_routed_experts=True))
    driver.run()
    experts = _experts(request)
    expected = models.oracle(mixtral).routing(request.tokens[:-1], MIXTRAL.top_k)
    assert experts.shape == (len(request.tokens) - 1, MIXTRAL.num_layers, MIXTRAL.top_k)
    for layer, expected_TK in enumerate(expected):
        np.testing.assert_array_equal(
            np.sort(experts[:, layer], axis=1), np.sort(expected_TK, axis=1)
        )


def test_models_without_experts_report_none(models: Models) -> None:
    """The positions come with no layers."""
    driver = RunnerDriver(make_runner(models.tiny(LLAMA)))
    request = driver.submit(PROMPT[:5], 2, pb.SamplingSpec(return_routed_experts=True))
    driver.run()
    assert [(m.start, m.num_tokens) for m in request.routed_experts] == [(0, 5), (5, 1)]
    assert _experts(request).size == 0


def test_a_paused_step_reports_nothing(mixtral: Path) -> None:
    """What it computed comes with the step that repeats it."""
    flaky = FlakyExperts(local_experts(Checkpoint.open(mixtral), "float32"))
    driver = RunnerDriver(make_runner(mixtral, experts=flaky))
    spec = pb.SamplingSpec(num_prompt_logprobs=1, return_routed_experts=True)
    request = driver.submit(PROMPT, 1, spec)
    flaky.error = ExpertUnavailableError([(1, 5)])
    paused = driver.step()
    assert paused.status == pb.StepResponse.STATUS_PAUSED
    assert not paused.prompt_logprobs
    assert not paused.routed_experts
    flaky.error = None
    driver.run()
    assert len(_joined_logprobs(request.prompt_logprobs)[0]) == len(PROMPT) - 1
    assert len(_experts(request)) == len(PROMPT)
