"""Drafts change how many tokens a step emits, and no token: proved against runs without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from attention_worker import drafts
from attention_worker.batch import SampleRows
from attention_worker.drafts import RETRY_TOKENS, Speculation
from attention_worker.experts import ExpertClient
from attention_worker.logits_edits import NO_MASKS
from attention_worker.request_slots import RequestSlots
from attention_worker.sampler import choose_tokens, count_emitted
from attention_worker.sampling_spec import SlotSampling
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import ExpertUnavailableError
from expertmesh.v1 import attention_service_pb2 as pb
from tests.support.flaky_experts import FlakyExperts
from tests.support.runner_driver import DrivenRequest, RunnerDriver, local_experts, make_runner
from tests.support.tiny_checkpoints import MIXTRAL_TEXT

if TYPE_CHECKING:
    pass

PROMPT = [7, 8, 9, 10, 11, 7, 8, 9, 10, 11, 7, 8]
LENGTH = 40
FEW = (7, 8, 9)
"""Random models repeat themselves if they have few tokens to choose from."""
EOS = MIXTRAL_TEXT.eos_token_id
SPECULATION = Speculation(num_tokens=5, lookup_max=4, lookup_min=1)

SPECS = {
    "greedy": pb.SamplingSpec(num_logprobs=2, allowed_token_ids=FEW),
    "seeded": pb.SamplingSpec(
        temperature=0.7, seed=3, top_p=0.9, min_p=0.01, allowed_token_ids=FEW
    ),
    "penalties": pb.SamplingSpec(
        temperature=0.5,
        seed=8,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.05,
        logit_bias=[pb.LogitBias(token_id=token, bias=15.0) for token in FEW],
    ),
    "bad words": pb.SamplingSpec(
        bad_words=[pb.TokenSequence(ids=ids) for ids in ([7, 8], [9, 9], [8, 8, 8])],
        allowed_token_ids=FEW,
    ),
    "min_tokens": pb.SamplingSpec(
        temperature=1.0,
        seed=2,
        min_tokens=30,
        stop_token_ids=[8, 9],
        allowed_token_ids=[7, 8, 9, 10],
        num_logprobs=0,
    ),
    "grammar": pb.SamplingSpec(
        temperature=1.0,
        seed=6,
        stop_token_ids=[EOS],
        grammar=LLMatcher.grammar_from_regex(r"((abc|abd), ){6}end"),
    ),
    "grammar and penalties": pb.SamplingSpec(
        temperature=2.0,
        seed=7,
        frequency_penalty=0.3,
        stop_token_ids=[EOS],
        grammar=LLMatcher.grammar_from_regex(r"[ab]{6}(x[ab]{2}){4}"),
    ),
}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if drafts cost nothing: they are always proposed, accepted or not."""
    monkeypatch.setattr(drafts, "FIXED_COST_ROWS", 1e12)


@contextmanager
def _driver(
    model_dir: Path,
    speculation: Speculation | None = SPECULATION,
    *,
    chunk: int = 512,
    max_model_len: int = 256,
    experts: ExpertClient | None = None,
) -> Iterator[RunnerDriver]:
    runner = make_runner(
        model_dir, speculation=speculation, max_model_len=max_model_len, experts=experts
    )
    yield RunnerDriver(runner, chunk=chunk)
    runner.grammars.close()


def _plain(model_dir: Path, spec: pb.SamplingSpec, length: int = LENGTH) -> DrivenRequest:
    with _driver(model_dir, None) as driver:
        request = driver.submit(PROMPT, length, spec)
        driver.run()
    return request


def _run(driver: RunnerDriver) -> tuple[int, int, int]:
    """Runs to the end: steps, drafts verified, drafts accepted."""
    steps = verified = accepted = 0
    while driver.running or driver.waiting:
        response = driver.step()
        assert response.status == pb.StepResponse.STATUS_DONE, response.message
        steps += 1
        verified += response.num_drafts_verified
        accepted += response.num_drafts_accepted
    return steps, verified, accepted


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", SPECS)
def test_tokens_are_those_without_drafts(text_model: Path, name: str) -> None:
    """Tokens, logits and log probabilities, bit by bit; and fewer steps are needed."""
    expected = _plain(text_model, SPECS[name])
    with _driver(text_model) as driver:
        request = driver.submit(PROMPT, LENGTH, SPECS[name])
        steps, verified, accepted = _run(driver)
    assert request.output == expected.output
    assert np.stack(request.logits).tobytes() == np.stack(expected.logits).tobytes()
    assert request.sampled == [
        pb.SampledToken(
            slot=request.slot,
            token_id=token.token_id,
            logprob=token.logprob if token.HasField("logprob") else None,
            top_logprobs=token.top_logprobs,
        )
        for token in expected.sampled
    ]
    assert 0 < accepted < verified
    assert steps == LENGTH - accepted


@pytest.mark.usefixtures("always")
def test_company_chunks_losses_and_new_admissions_do_not_matter(text_model: Path) -> None:
    """All of the requests above at once, with a paused step and a preemption in between."""
    expected = {name: _plain(text_model, spec).output for name, spec in SPECS.items()}
    flaky = FlakyExperts(local_experts(Checkpoint.open(text_model), "float32"))
    with _driver(text_model, chunk=5, experts=flaky) as driver:
        requests = {name: driver.submit(PROMPT, LENGTH, spec) for name, spec in SPECS.items()}
        for _ in range(7):
            driver.step()
        flaky.error = ExpertUnavailableError([(1, 5)])
        assert driver.step().status == pb.StepResponse.STATUS_PAUSED
        flaky.error = None
        driver.step()
        for name in ("penalties", "grammar"):
            assert 0 < len(requests[name].output) < LENGTH
            driver.preempt(requests[name])
        _run(driver)
    assert {name: request.output for name, request in requests.items()} == expected


@pytest.mark.usefixtures("always")
def test_fewer_drafts_than_proposed_may_be_scheduled(text_model: Path) -> None:
    """By a gateway that has no room for more; even none."""
    expected = _plain(text_model, SPECS["greedy"])
    with _driver(text_model) as driver:
        request = driver.submit(PROMPT, LENGTH, SPECS["greedy"])
        verified = 0
        while not request.finished:
            request.num_drafts = min(request.num_drafts, len(request.output) % 3)
            verified += driver.step().num_drafts_verified
    assert request.output == expected.output
    assert verified


@pytest.mark.usefixtures("always")
def test_drafts_end_where_the_context_ends(text_model: Path) -> None:
    """The last token of max_model_len can be sampled, with drafts before it."""
    total = len(PROMPT) + LENGTH
    expected = _plain(text_model, SPECS["greedy"])
    with _driver(text_model, max_model_len=total) as driver:
        request = driver.submit(PROMPT, LENGTH, SPECS["greedy"])
        _, _, accepted = _run(driver)
    assert request.output == expected.output
    assert len(request.tokens) == total
    assert accepted


@pytest.mark.usefixtures("always")
def test_nothing_follows_a_stop_token_in_a_step(text_model: Path) -> None:
    """Also if it was an accepted draft; a client must not see what comes after its end."""
    loop = _plain(text_model, SPECS["greedy"]).output
    stop = loop[-1]
    spec = pb.SamplingSpec(stop_token_ids=[stop], allowed_token_ids=FEW)
    with _driver(text_model) as driver:
        request = driver.submit(PROMPT, LENGTH, spec)
        several = 0
        while not request.finished:
            sampled = [token.token_id for token in driver.step().sampled]
            assert stop not in sampled[:-1]
            several += len(sampled) > 1 and sampled[-1] == stop
    assert request.output == loop
    assert several


@pytest.mark.usefixtures("always")
def test_broken_logits_end_a_request_where_they_would_without_drafts(text_model: Path) -> None:
    """After a draft whose embedding is NaN: what comes before it is emitted, then it is told."""
    outputs = []
    for speculation in (None, SPECULATION):
        with _driver(text_model, speculation) as driver:
            request = driver.submit(PROMPT, LENGTH, SPECS["seeded"])
            for _ in range(6):
                driver.step()
            driver.runner.model.embed_VH[8] = float("nan")
            while not (response := driver.step()).nonfinite_slots:
                assert response.sampled
            assert list(response.nonfinite_slots) == [request.slot]
            assert not response.failures
        outputs.append(request.output)
    shorter, longer = sorted(outputs, key=len)
    assert longer[: len(shorter)] == shorter
    assert shorter[-1] == longer[-1] == 8


@pytest.mark.usefixtures("always")
def test_rejected_drafts_are_not_reported(text_model: Path) -> None:
    """Experts are those of the run without drafts, each position once."""
    spec = pb.SamplingSpec(return_routed_experts=True)
    spec.MergeFrom(SPECS["seeded"])
    results = []
    for speculation in (None, SPECULATION):
        with _driver(text_model, speculation) as driver:
            request = driver.submit(PROMPT, LENGTH, spec)
            _run(driver)
        position = 0
        for message in request.routed_experts:
            assert message.start == position
            position += message.num_tokens
        assert position == len(request.tokens) - 1
        results.append(b"".join(message.expert_ids for message in request.routed_experts))
    assert results[0] == results[1]


@pytest.mark.usefixtures("always")
def test_scheduled_drafts_must_have_been_proposed(text_model: Path) -> None:
    """More than that, or some without sampling, are named as tokens that nobody knows."""
    with _driver(text_model) as driver:
        request = driver.submit(PROMPT, LENGTH, SPECS["greedy"])
        driver.step()
        num_known = len(request.tokens) + request.num_drafts
        step = driver.next_request()
        [work] = step.scheduled
        work.num_tokens += 1
        response = driver.runner.execute(step)
        assert f"tokens end at {num_known + 1}, but only {num_known} are known" in response.message
        step.step += 1
        work.num_tokens -= 1
        work.sample = False
        response = driver.runner.execute(step)
        assert f"only {len(request.tokens)} are known" in response.message


def test_drafts_that_do_not_pay_stop_and_are_tried_again(text_model: Path) -> None:
    """Of a request whose tokens are random: single drafts, some tokens apart."""
    spec = pb.SamplingSpec(temperature=100.0, seed=1, allowed_token_ids=range(100, 150))
    with _driver(text_model) as driver:
        request = driver.submit(PROMPT, 200, spec)
        proposed_at = []
        while not request.finished:
            driver.step()
            if request.num_drafts:
                proposed_at.append((len(request.output), request.num_drafts))
    late = [entry for entry in proposed_at if entry[0] > 60]
    assert proposed_at[0][1] > 1
    assert late
    assert {num for _, num in late} == {1}
    gaps = np.diff([at for at, _ in late])
    assert (gaps > RETRY_TOKENS).all()


def test_many_sequences_get_fewer_drafts(text_model: Path) -> None:
    """A step of many rows has less to gain."""
    nums = []
    for num_requests in (1, 12):
        with _driver(text_model) as driver:
            requests = [driver.submit(PROMPT, 3, SPECS["greedy"]) for _ in range(num_requests)]
            driver.step()
            nums.append(requests[0].num_drafts)
    assert nums[0] > nums[1]


def _rows(num_slots: int, num_rows: int, length: int) -> SampleRows:
    return SampleRows(
        slots_R=np.repeat(np.arange(num_slots), num_rows),
        positions_R=np.tile(np.arange(length, length + num_rows), num_slots),
        first_P=np.arange(0, num_slots * num_rows, num_rows),
    )


def test_the_distribution_is_that_of_the_model() -> None:
    """Of 30,000 seeds: the first token, and the second given that a draft was accepted."""
    num_slots, draft = 30_000, 2
    slots = RequestSlots(num_slots, 8)
    for slot in range(num_slots):
        sampling = SlotSampling(temperature=1.0, seed=slot * 7919)
        slots.add(slot, np.zeros(3, np.int32), 3, sampling)
    slots.token_ids_SL[:, 3] = draft
    first = np.array([0.1, 0.2, 0.4, 0.3])
    second = np.array([0.5, 0.1, 0.15, 0.25])
    logits = np.log(np.stack([first, second])).astype(np.float32)
    rows = _rows(num_slots, 2, 3)
    tokens = choose_tokens(torch.from_numpy(np.tile(logits, (num_slots, 1))), rows, slots, NO_MASKS)
    first_P, second_P = tokens.token_ids_R[::2], tokens.token_ids_R[1::2]
    accepted_P = tokens.num_emitted_P == 2
    np.testing.assert_array_equal(accepted_P, first_P == draft)
    for sample, expected in ((first_P, first), (second_P[accepted_P], second)):
        frequencies = np.bincount(sample, minlength=4) / len(sample)
        bound = 4 * np.sqrt(expected * (1 - expected) / len(sample))
        assert (np.abs(frequencies - expected) < bound).all()


@pytest.mark.parametrize(
    ("tokens", "usable", "emitted"),
    [
        ([5, 6, 7, 1], [1, 1, 1, 1], 4),
        ([5, 6, 9, 1], [1, 1, 1, 1], 3),
        ([4, 6, 7, 1], [1, 1, 1, 1], 1),
        ([5, 6, 7, 1], [1, 1, 0, 1], 2),
        ([5, 6, 7, 1], [0, 1, 1, 1], 0),
        ([5, 6, 7, 1], [1, 1, 1, 0], 3),
    ],
)
def test_only_leading_rows_count(tokens: list[int], usable: list[int], emitted: int) -> None:
    """Up to the first draft that was not sampled, or the first row that is not usable."""
    slots = RequestSlots(2, 8)
    for slot in range(2):
        slots.add(slot, np.zeros(2, np.int32), 2, SlotSampling(stop_ids=np.array([8])))
    slots.token_ids_SL[:, 2:5] = [5, 6, 7]
    rows = _rows(2, 4, 2)
    both = count_emitted(
        rows, np.array([*tokens, 5, 6, 7, 0]), np.array([*usable, 1, 1, 1, 1], np.bool_), slots
    )
    assert both.tolist() == [emitted, 4]
