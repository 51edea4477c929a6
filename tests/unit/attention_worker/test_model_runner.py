"""Steps as transactions: what commits, what pauses, what fails, and what stays of each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from attention_worker.model_runner import ModelRunner
from attention_worker.warm_up import ZeroExperts, warm_up
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import ExpertUnavailableError
from expertmesh.v1 import attention_service_pb2 as pb
from tests.support.flaky_experts import FlakyExperts
from tests.support.oracle import prompts
from tests.support.runner_driver import DrivenRequest, RunnerDriver, local_experts, make_runner
from tests.support.tiny_checkpoints import LLAMA, MIXTRAL

if TYPE_CHECKING:
    from tests.conftest import Models

DONE = pb.StepResponse.STATUS_DONE
PAUSED = pb.StepResponse.STATUS_PAUSED
FAILED = pb.StepResponse.STATUS_FAILED
PROMPT = prompts(MIXTRAL.vocab_size, [21])[0]


@pytest.fixture
def mixtral(models: Models) -> Path:
    """A tiny Mixtral."""
    return models.tiny(MIXTRAL)


@pytest.fixture
def flaky(mixtral: Path) -> FlakyExperts:
    """Experts that work until told otherwise."""
    return FlakyExperts(local_experts(Checkpoint.open(mixtral), "float32"))


def _undisturbed(model_dir: Path) -> DrivenRequest:
    driver = RunnerDriver(make_runner(model_dir), chunk=16)
    request = driver.submit(PROMPT, 8)
    driver.run()
    return request


def test_paused_step_commits_nothing_and_can_be_repeated(
    mixtral: Path, flaky: FlakyExperts
) -> None:
    """The retry has no deltas, only the work; tokens and logits are those of a calm run."""
    driver = RunnerDriver(make_runner(mixtral, experts=flaky), chunk=16)
    request = driver.submit(PROMPT, 8)
    for num_output in (0, 3):
        while len(request.output) < num_output:
            driver.step()
        flaky.error = ExpertUnavailableError([(1, 5), (1, 7)], detail="worker b is gone")
        paused = driver.step()
        assert paused.status == PAUSED
        assert [(m.layer, m.expert) for m in paused.missing] == [(1, 5), (1, 7)]
        assert "worker b is gone" in paused.message
        assert not paused.sampled
        flaky.error = None
    driver.run()
    expected = _undisturbed(mixtral)
    assert request.output == expected.output
    assert np.array_equal(np.stack(request.logits), np.stack(expected.logits))


def test_parts_of_a_step_are_told(mixtral: Path) -> None:
    """Dispatch, waiting and sampling take some time each, and no more than the whole."""
    driver = RunnerDriver(make_runner(mixtral), chunk=16)
    driver.submit(PROMPT[:9], 2)
    response = driver.step()
    parts = (response.dispatch_us, response.expert_wait_us, response.sampling_us)
    assert response.dispatch_us > 0
    assert response.sampling_us > 0
    assert sum(parts) <= response.duration_us


def test_unexpected_error_fails_the_step_only(mixtral: Path, flaky: FlakyExperts) -> None:
    """The worker goes on: the same work succeeds in the next step."""
    driver = RunnerDriver(make_runner(mixtral, experts=flaky), chunk=16)
    request = driver.submit(PROMPT, 8)
    flaky.error = ZeroDivisionError("a bug")
    failed = driver.step()
    assert (failed.status, failed.message) == (FAILED, "ZeroDivisionError: a bug")
    flaky.error = None
    driver.run()
    assert request.output == _undisturbed(mixtral).output


def test_malformed_step_fails_with_its_reason(mixtral: Path) -> None:
    """Slot and value are named, the step's number is echoed, and the worker goes on."""
    runner = make_runner(mixtral)
    step = pb.StepRequest(step=7, scheduled=[pb.ScheduledRequest(slot=3, num_tokens=1)])
    response = runner.execute(step)
    assert (response.step, response.status) == (7, FAILED)
    assert response.message == "malformed step: slot 3: holds no request"
    again = runner.execute(step)
    assert again.message == "malformed step: number 7, expected more than 7"
    assert runner.execute(pb.StepRequest(step=8)).status == DONE


def test_rows_are_classed_and_calls_have_deadlines(mixtral: Path, flaky: FlakyExperts) -> None:
    """A step of two decodes and a prompt chunk says that two rows are generated ones."""
    driver = RunnerDriver(make_runner(mixtral, experts=flaky), chunk=16)
    driver.submit(PROMPT[:4], 6)
    driver.submit(PROMPT[:6], 6)
    driver.step()
    driver.submit(PROMPT, 1)
    flaky.num_generated_rows.clear()
    driver.step()
    assert flaky.num_generated_rows == [2] * MIXTRAL.num_layers
    assert flaky.deadlines_s == sorted(flaky.deadlines_s)
    before_s = flaky.deadlines_s[-1]
    limited = driver.next_request()
    limited.time_limit_ms = 1000
    driver.runner.execute(limited)
    assert all(deadline_s < before_s for deadline_s in flaky.deadlines_s[-MIXTRAL.num_layers :])


def test_slots_with_nonfinite_logits_are_named_and_get_no_token(models: Models) -> None:
    """A sequence whose embedding is NaN ends; its neighbour's logits keep their bits."""
    model_dir = models.tiny(LLAMA)
    calm = RunnerDriver(make_runner(model_dir))
    expected = calm.submit([5, 6, 7], 1)
    calm.run()
    runner = make_runner(model_dir)
    runner.model.embed_VH[99] = float("nan")
    driver = RunnerDriver(runner)
    good, bad = driver.submit([5, 6, 7], 2), driver.submit([4, 99], 2)
    response = driver.step()
    assert response.status == DONE
    assert list(response.nonfinite_slots) == [bad.slot]
    assert [token.slot for token in response.sampled] == [good.slot]
    assert np.array_equal(good.logits[0], expected.logits[0])


def test_a_step_sent_ahead_leaves_out_who_got_no_token(models: Models) -> None:
    """The step behind counts on a token that never came: only that request is left out of it, and
    its slot can be used again."""
    model_dir = models.tiny(LLAMA)
    calm = RunnerDriver(make_runner(model_dir))
    expected = calm.submit([5, 6, 7], 2)
    calm.run()
    runner = make_runner(model_dir)
    runner.model.embed_VH[99] = float("nan")
    driver = RunnerDriver(runner)
    good, bad = driver.submit([5, 6, 7], 2), driver.submit([4, 99], 2)
    assert list(driver.step().nonfinite_slots) == [bad.slot]
    ahead = [
        pb.ScheduledRequest(slot=request.slot, start=start, num_tokens=1, sample=True)
        for request, start in ((bad, 2), (good, 3))
    ]
    response = runner.execute(pb.StepRequest(step=2, after_step=1, scheduled=ahead))
    assert response.status == DONE, response.message
    assert [(token.slot, token.token_id) for token in response.sampled] == [
        (good.slot, expected.output[1])
    ]
    again = pb.NewRequest(
        slot=bad.slot, token_ids=np.array([5, 6, 7], "<i4").tobytes(), num_prompt_tokens=3
    )
    work = pb.ScheduledRequest(
        slot=bad.slot,
        start=0,
        num_tokens=3,
        sample=True,
        new_blocks=[pb.BlockAppend(block_ids=[9])],
    )
    reused = pb.StepRequest(step=3, freed_slots=[bad.slot], new_requests=[again], scheduled=[work])
    assert [token.token_id for token in runner.execute(reused).sampled] == expected.output[:1]


def test_seeded_samples_do_not_depend_on_the_batch(mixtral: Path) -> None:
    """Noise is a function of seed and position: alone and among others, in any chunks."""
    sampling = pb.SamplingSpec(temperature=0.8, top_p=0.9, top_k=50, seed=11)
    alone = RunnerDriver(make_runner(mixtral))
    expected = alone.submit(PROMPT, 10, sampling)
    alone.run()
    crowd = RunnerDriver(make_runner(mixtral), chunk=5)
    crowd.submit(PROMPT[:13], 12, pb.SamplingSpec(temperature=1.3, seed=11))
    request = crowd.submit(PROMPT, 10, sampling)
    other_seed = crowd.submit(PROMPT, 10, pb.SamplingSpec(temperature=0.8, seed=12))
    crowd.run()
    assert request.output == expected.output
    assert other_seed.output != expected.output


def test_logprobs_come_to_those_who_ask(mixtral: Path) -> None:
    """The chosen token's log probability, and the most likely tokens, descending."""
    driver = RunnerDriver(make_runner(mixtral))
    silent = driver.submit(PROMPT, 1)
    zero = driver.submit(PROMPT, 1, pb.SamplingSpec(num_logprobs=0))
    three = driver.submit(PROMPT, 1, pb.SamplingSpec(num_logprobs=3))
    driver.run()
    assert not silent.sampled[0].HasField("logprob")
    assert zero.sampled[0].HasField("logprob")
    assert not zero.sampled[0].top_logprobs
    logprobs_V = torch.from_numpy(three.logits[0]).log_softmax(-1)
    values, ids = logprobs_V.topk(3)
    top = three.sampled[0].top_logprobs
    assert [entry.token_id for entry in top] == ids.tolist()
    assert [entry.logprob for entry in top] == pytest.approx(values.tolist(), abs=1e-4)
    assert three.sampled[0].logprob == pytest.approx(float(values[0]), abs=1e-4)


def test_sequence_fills_the_context_and_not_more(mixtral: Path) -> None:
    """The last token of max_model_len can be sampled; one beyond is refused."""
    driver = RunnerDriver(make_runner(mixtral, max_model_len=24))
    request = driver.submit(PROMPT, 4)
    for _ in range(3):
        assert driver.step().status == DONE
    assert len(request.tokens) == 24
    response = driver.step()
    assert response.status == FAILED
    assert "beyond max_model_len=24" in response.message


def test_reset_frees_every_slot(mixtral: Path) -> None:
    """After a reset the same slots, blocks and step numbers can be used again."""
    runner = make_runner(mixtral, num_slots=2)
    first = RunnerDriver(runner)
    for _ in range(2):
        first.submit(PROMPT, 8)
    first.step()
    runner.reset()
    second = RunnerDriver(runner)
    request = second.submit(PROMPT, 8)
    second.run()
    assert request.output == _undisturbed(mixtral).output


@pytest.mark.parametrize("shape", [MIXTRAL, LLAMA], ids=["mixtral", "llama"])
def test_warm_up_leaves_no_trace(models: Models, shape: object) -> None:
    """Requests after a warm-up are answered as without one."""
    model_dir = models.tiny(shape)  # type: ignore[arg-type]
    runner: ModelRunner = make_runner(model_dir)
    plain = RunnerDriver(make_runner(model_dir))
    expected = plain.submit(PROMPT, 4)
    plain.run()
    checkpoint = Checkpoint.open(model_dir)
    for experts in (
        ZeroExperts(checkpoint.config, checkpoint.fingerprint, "float32"),
        local_experts(checkpoint, "float32"),
    ):
        warm_up(runner.model, runner.state.kv, experts)
    driver = RunnerDriver(runner)
    request = driver.submit(PROMPT, 4)
    driver.run()
    assert request.output == expected.output
