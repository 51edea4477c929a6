"""Grammars in real steps: output matches, whatever else is asked, and a bad one fails alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from attention_worker.drafts import Speculation
from attention_worker.model_runner import ModelRunner
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import ExpertUnavailableError
from expertmesh.v1 import attention_service_pb2 as pb
from tests.support.flaky_experts import FlakyExperts
from tests.support.oracle import prompts
from tests.support.runner_driver import DrivenRequest, RunnerDriver, local_experts, make_runner
from tests.support.tiny_checkpoints import MIXTRAL, MIXTRAL_TEXT, save_tiny, save_tokenizer

if TYPE_CHECKING:
    from tests.conftest import Models

EOS = MIXTRAL_TEXT.eos_token_id
PROMPT = prompts(MIXTRAL_TEXT.vocab_size, [17])[0]
LIST = LLMatcher.grammar_from_regex(r"[a-c]{2}(, [a-c]{2}){1,3}")
OBJECT = LLMatcher.grammar_from_json_schema(
    {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "s": {"enum": ["x", "yes"]}},
        "required": ["n", "s"],
        "additionalProperties": False,
    },
    overrides={"whitespace_flexible": False},
)


def _spec(grammar: str, **fields: Any) -> pb.SamplingSpec:
    values: dict[str, Any] = {"temperature": 1.0, "seed": 4, "stop_token_ids": [EOS]}
    return pb.SamplingSpec(grammar=grammar, **(values | fields))


class _Runners:
    """Makes runners and closes them."""

    def __init__(self) -> None:
        self._made: list[ModelRunner] = []

    def __call__(self, *args: Any, **fields: Any) -> ModelRunner:
        runner = make_runner(*args, **fields)
        self._made.append(runner)
        return runner

    def close(self) -> None:
        for runner in self._made:
            runner.grammars.close()


@pytest.fixture
def new_runner() -> Iterator[_Runners]:
    """`make_runner`, with the end of what it made."""
    runners = _Runners()
    yield runners
    runners.close()


def _text(model_dir: Path, request: DrivenRequest) -> str:
    """The output up to the first end token, which must be there."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return tokenizer.decode(request.output[: request.output.index(EOS)], skip_special_tokens=False)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_output_matches_the_grammar_and_ends(
    text_model: Path, new_runner: _Runners, temperature: float
) -> None:
    """Of several requests with grammars of their own in one batch, and one without."""
    driver = RunnerDriver(new_runner(text_model), chunk=6)
    free = driver.submit(PROMPT, 30)
    listed = driver.submit(PROMPT[:9], 30, _spec(LIST, temperature=temperature))
    described = driver.submit(PROMPT, 60, _spec(OBJECT, temperature=temperature, top_k=4))
    driver.run()
    assert re.fullmatch(r"[a-c]{2}(, [a-c]{2}){1,3}", _text(text_model, listed))
    assert set(json.loads(_text(text_model, described))) == {"n", "s"}
    end = listed.output.index(EOS)
    assert set(listed.output[end:]) == {EOS}
    alone = RunnerDriver(new_runner(text_model))
    expected = alone.submit(PROMPT, 30)
    alone.run()
    assert free.output == expected.output
    assert np.array_equal(np.stack(free.logits), np.stack(expected.logits))


def test_tokens_depend_on_the_request_alone(text_model: Path, new_runner: _Runners) -> None:
    """Seeded, with penalties: alone, among others, after a new admission, with a lost step."""
    spec = _spec(
        OBJECT, temperature=2.0, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.3
    )
    alone = RunnerDriver(new_runner(text_model))
    expected = alone.submit(PROMPT, 24, spec)
    alone.run()
    flaky = FlakyExperts(local_experts(Checkpoint.open(text_model), "float32"))
    crowd = RunnerDriver(new_runner(text_model, experts=flaky), chunk=5)
    crowd.submit(PROMPT[2:], 30, _spec(LIST, seed=9))
    crowd.submit(PROMPT[:4], 30, pb.SamplingSpec(temperature=1.0, frequency_penalty=1.0))
    request = crowd.submit(PROMPT, 24, spec)
    for _ in range(8):
        crowd.step()
    flaky.error = ExpertUnavailableError([(1, 5)])
    assert crowd.step().status == pb.StepResponse.STATUS_PAUSED
    flaky.error = None
    for _ in range(2):
        crowd.step()
    assert 2 < len(request.output) < 24
    crowd.preempt(request)
    crowd.run()
    assert request.output == expected.output


def test_a_bad_grammar_fails_its_request_alone(text_model: Path, new_runner: _Runners) -> None:
    """Its slot is named with what is wrong; others get their tokens in the same step."""
    driver = RunnerDriver(new_runner(text_model), chunk=6)
    good = driver.submit(PROMPT[:5], 4, _spec(LIST))
    bad = driver.submit(PROMPT[:5], 4, _spec("start: nonsense [["))
    response = driver.step()
    assert response.status == pb.StepResponse.STATUS_DONE
    assert [token.slot for token in response.sampled] == [good.slot]
    assert not response.nonfinite_slots
    [failure] = response.failures
    assert failure.slot == bad.slot
    assert failure.message.startswith("grammar: ")
    assert "nonsense" in failure.message or "Expected" in failure.message
    driver.step()
    assert len(good.output) == 2


def test_generated_tokens_outside_of_the_grammar_are_told(
    text_model: Path, new_runner: _Runners
) -> None:
    """A request that is admitted with such tokens cannot go on."""
    driver = RunnerDriver(new_runner(text_model))
    request = driver.submit(PROMPT, 4, _spec(LIST))
    request.tokens += [50, 51]
    [failure] = driver.step().failures
    assert "token 50 is outside of the grammar" in failure.message


def test_models_without_a_tokenizer_have_no_grammars(models: Models, new_runner: _Runners) -> None:
    """Said to the request that asks; the first chunks of its prompt fail nothing."""
    driver = RunnerDriver(new_runner(models.tiny(MIXTRAL)), chunk=6)
    driver.submit([5] * 9, 4, _spec(LIST))
    assert not driver.step().failures
    [failure] = driver.step().failures
    assert failure.message == "grammar: the model has no tokenizer.json"


def test_tokens_beyond_the_tokenizer_are_not_chosen(tmp_path: Path, new_runner: _Runners) -> None:
    """Of a model with more rows than its tokenizer has tokens, however likely those are."""
    model_dir = save_tiny(tmp_path / "model", replace(MIXTRAL_TEXT, vocab_size=340))
    save_tokenizer(model_dir, 320)
    bias = [pb.LogitBias(token_id=token, bias=100.0) for token in range(320, 340)]
    driver = RunnerDriver(new_runner(model_dir))
    grammar = LLMatcher.grammar_from_regex("[a-z]{4}")
    request = driver.submit(PROMPT, 6, _spec(grammar, logit_bias=bias))
    driver.run()
    assert re.fullmatch("[a-z]{4}", _text(model_dir, request))


def test_drafts_beyond_the_tokenizer_do_no_harm(tmp_path: Path, new_runner: _Runners) -> None:
    """A prompt may hold such tokens, so that lookup proposes them: they are just not allowed."""
    model_dir = save_tiny(tmp_path / "model", replace(MIXTRAL_TEXT, vocab_size=340))
    save_tokenizer(model_dir, 320)
    letter = Tokenizer.from_file(str(model_dir / "tokenizer.json")).token_to_id("a")
    speculation = Speculation(num_tokens=3, lookup_min=1)
    driver = RunnerDriver(new_runner(model_dir, speculation=speculation))
    grammar = LLMatcher.grammar_from_regex("a{9}")
    request = driver.submit([letter, 330, letter, 331], 10, _spec(grammar))
    verified = 0
    while not request.finished:
        response = driver.step()
        assert not response.failures
        verified += response.num_drafts_verified
    assert request.output == [letter] * 9 + [EOS]
    assert verified > 0


def test_drafts_of_end_tokens_let_nothing_follow(text_model: Path, new_runner: _Runners) -> None:
    """An output that goes on past its grammar has only end tokens, which are soon proposed; where
    the request ignores them the tokens after such drafts count."""
    spec = _spec(
        LLMatcher.grammar_from_regex("ab"),
        stop_token_ids=[],
        logit_bias=[pb.LogitBias(token_id=7, bias=1000.0)],
    )
    runner = new_runner(text_model, speculation=Speculation(num_tokens=4, lookup_min=1))
    driver = RunnerDriver(runner)
    request = driver.submit(PROMPT, 24, spec)
    accepted = 0
    while not request.finished:
        accepted += driver.step().num_drafts_accepted
    tokenizer = Tokenizer.from_file(str(text_model / "tokenizer.json"))
    assert tokenizer.decode(request.output[:2]) == "ab"
    assert request.output[2:] == [EOS] * 22
    assert accepted > 10


def test_end_tokens_wait_for_the_grammar(text_model: Path, new_runner: _Runners) -> None:
    """However likely; also those of the request that the tokenizer does not know as such."""
    own_end = 1
    spec = _spec(
        LLMatcher.grammar_from_regex("ab*"),
        stop_token_ids=[own_end],
        logit_bias=[pb.LogitBias(token_id=own_end, bias=1000.0)],
    )
    driver = RunnerDriver(new_runner(text_model))
    request = driver.submit(PROMPT, 3, spec)
    driver.run()
    tokenizer = Tokenizer.from_file(str(text_model / "tokenizer.json"))
    assert tokenizer.decode(request.output[:1]).startswith("a")
    assert request.output[1] == own_end


def test_nothing_overrides_a_grammar(text_model: Path, new_runner: _Runners) -> None:
    """Allowed tokens and a minimum that the grammar cannot meet give way, and the output ends."""
    tokenizer = Tokenizer.from_file(str(text_model / "tokenizer.json"))
    a, b = (tokenizer.token_to_id(letter) for letter in "ab")
    driver = RunnerDriver(new_runner(text_model))
    grammar = LLMatcher.grammar_from_regex("a{3}")
    impossible = driver.submit(PROMPT, 5, _spec(grammar, allowed_token_ids=[b]))
    longer = driver.submit(PROMPT, 5, _spec(grammar, min_tokens=5, allowed_token_ids=[a]))
    driver.run()
    assert _text(text_model, impossible) == "aaa"
    assert longer.output == [a, a, a, EOS, EOS]
