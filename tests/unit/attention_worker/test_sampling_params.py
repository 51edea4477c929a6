"""Sampling parameters in real steps: what they do, and that they depend on the request alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from attention_worker.sampling_spec import MAX_LIST_LEN, read_sampling
from expertmesh.v1 import attention_service_pb2 as pb
from tests.support.oracle import prompts
from tests.support.runner_driver import DrivenRequest, RunnerDriver, make_runner
from tests.support.sampling_reference import token_reference
from tests.support.tiny_checkpoints import MIXTRAL

if TYPE_CHECKING:
    from tests.conftest import Models

PROMPT = prompts(MIXTRAL.vocab_size, [21])[0]
LENGTH = 12
EVERYTHING = pb.SamplingSpec(
    temperature=1.5,
    min_p=0.001,
    top_p=0.98,
    top_k=100,
    seed=5,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias=[pb.LogitBias(token_id=7, bias=2.0), pb.LogitBias(token_id=9, bias=-3.0)],
    allowed_token_ids=range(3, 120),
    bad_words=[pb.TokenSequence(ids=[11]), pb.TokenSequence(ids=[7, 7])],
    min_tokens=6,
    stop_token_ids=[2, 40, 41],
)


@pytest.fixture
def mixtral(models: Models) -> Path:
    """A tiny Mixtral."""
    return models.tiny(MIXTRAL)


def _bias(**biases: float) -> list[pb.LogitBias]:
    return [pb.LogitBias(token_id=int(name[1:]), bias=value) for name, value in biases.items()]


def _run(model_dir: Path, sampling: pb.SamplingSpec, num_tokens: int = LENGTH) -> DrivenRequest:
    driver = RunnerDriver(make_runner(model_dir))
    request = driver.submit(PROMPT, num_tokens, sampling)
    driver.run()
    return request


SPECS = {
    "bias": pb.SamplingSpec(logit_bias=_bias(t7=4.0, t50=-100.0)),
    "repetition": pb.SamplingSpec(repetition_penalty=1.8),
    "presence": pb.SamplingSpec(presence_penalty=6.0),
    "frequency": pb.SamplingSpec(frequency_penalty=-2.0),
    "min_p": pb.SamplingSpec(temperature=3.0, min_p=0.2, seed=3),
    "allowed": pb.SamplingSpec(allowed_token_ids=range(30, 60)),
    "everything": EVERYTHING,
}


@pytest.mark.parametrize("name", SPECS)
def test_tokens_are_those_of_the_definition(mixtral: Path, name: str) -> None:
    """Each token follows from logits, prompt and output by a reference that is written apart."""
    request = _run(mixtral, SPECS[name])
    for index, logits_V in enumerate(request.logits):
        output = request.output[:index]
        assert request.output[index] == token_reference(logits_V, PROMPT, output, SPECS[name])
    assert request.output != _run(mixtral, pb.SamplingSpec()).output


def test_bad_words_do_not_occur(mixtral: Path) -> None:
    """Of the tokens that come without them: a single one, and a pair of which either may come."""
    plain = _run(mixtral, pb.SamplingSpec()).output
    words = [[plain[2]], plain[4:6]]
    spec = pb.SamplingSpec(bad_words=[pb.TokenSequence(ids=word) for word in words])
    output = _run(mixtral, spec).output
    assert output[:2] == plain[:2]
    assert plain[2] not in output
    assert plain[4:6] not in [output[i : i + 2] for i in range(len(output))]


def test_stop_tokens_wait_for_min_tokens(mixtral: Path) -> None:
    """A token that is wanted very much comes just when it may."""
    spec = pb.SamplingSpec(logit_bias=_bias(t2=1000.0), stop_token_ids=[2], min_tokens=4)
    output = _run(mixtral, spec).output
    assert 2 not in output[:4]
    assert output[4] == 2


def test_tokens_depend_on_the_request_alone(mixtral: Path) -> None:
    """With every parameter: alone, among others in any chunks, and after a new admission."""
    expected = _run(mixtral, EVERYTHING).output
    crowd = RunnerDriver(make_runner(mixtral), chunk=5)
    others = [
        crowd.submit(PROMPT[:9], 14, pb.SamplingSpec(temperature=2.0, frequency_penalty=1.0)),
        crowd.submit(PROMPT, 14, pb.SamplingSpec(allowed_token_ids=[4, 5, 6])),
        crowd.submit(PROMPT[3:], 14),
    ]
    request = crowd.submit(PROMPT, LENGTH, EVERYTHING)
    for _ in range(9):
        crowd.step()
    assert 0 < len(request.output) < LENGTH
    crowd.preempt(request)
    crowd.run()
    assert request.output == expected
    plain = RunnerDriver(make_runner(mixtral))
    alone = plain.submit(PROMPT[3:], 14)
    plain.run()
    assert others[2].output == alone.output
    assert np.array_equal(np.stack(others[2].logits), np.stack(alone.logits))


def test_log_probabilities_are_those_of_the_model(mixtral: Path) -> None:
    """Changes to logits decide what is chosen, and do not show in its log probability."""
    spec = pb.SamplingSpec(logit_bias=_bias(t7=100.0), num_logprobs=2)
    request = _run(mixtral, spec, num_tokens=2)
    assert request.output == [7, 7]
    for token, logits_V in zip(request.sampled, request.logits, strict=True):
        expected_V = torch.from_numpy(logits_V).log_softmax(-1)
        assert token.logprob == pytest.approx(float(expected_V[7]), abs=1e-4)
        assert [top.token_id for top in token.top_logprobs] == expected_V.topk(2).indices.tolist()


def test_a_token_comes_even_if_the_request_allows_none(mixtral: Path) -> None:
    """The output ends if it can; else bad words, then the minimum, give way."""
    nothing = pb.SamplingSpec(
        allowed_token_ids=[8, 9], bad_words=[pb.TokenSequence(ids=[token]) for token in (8, 9)]
    )
    assert set(_run(mixtral, nothing).output) <= {8, 9}
    ends = pb.SamplingSpec()
    ends.CopyFrom(nothing)
    ends.stop_token_ids.extend([2, 3])
    assert set(_run(mixtral, ends, num_tokens=3).output) <= {2, 3}


BAD_SPECS: list[tuple[pb.SamplingSpec, str]] = [
    (pb.SamplingSpec(min_p=1.5), "min_p is 1.5, expected 0 to 1"),
    (pb.SamplingSpec(min_p=float("nan")), "min_p is nan"),
    (pb.SamplingSpec(repetition_penalty=-1), "repetition_penalty is -1.0"),
    (pb.SamplingSpec(presence_penalty=float("inf")), "presence_penalty is inf"),
    (pb.SamplingSpec(frequency_penalty=float("nan")), "frequency_penalty is nan"),
    (pb.SamplingSpec(logit_bias=_bias(t10=1.0)), "logit_bias has token id 10, expected 0 to 9"),
    (pb.SamplingSpec(logit_bias=_bias(t1=float("inf"))), "logit_bias has a value that is not fin"),
    (pb.SamplingSpec(allowed_token_ids=[3, 11]), "allowed_token_ids has token id 11"),
    (pb.SamplingSpec(allowed_token_ids=[1] * 11), "allowed_token_ids has 11 entries"),
    (pb.SamplingSpec(bad_words=[pb.TokenSequence()]), "bad_words has an entry without tokens"),
    (pb.SamplingSpec(bad_words=[pb.TokenSequence(ids=[10])]), "bad_words has token id 10"),
    (
        pb.SamplingSpec(bad_words=[pb.TokenSequence(ids=[1])] * (MAX_LIST_LEN + 1)),
        "bad_words has 4097 entries, expected at most 4096",
    ),
    (pb.SamplingSpec(stop_token_ids=range(4097)), "stop_token_ids has 4097 entries"),
    (pb.SamplingSpec(num_prompt_logprobs=11), "num_prompt_logprobs is 11, expected at most 10"),
    (pb.SamplingSpec(grammar="x" * (2**23 + 1)), "grammar has 8388609 characters"),
]


@pytest.mark.parametrize(("spec", "message"), BAD_SPECS, ids=[text for _, text in BAD_SPECS])
def test_bad_parameters_are_named(spec: pb.SamplingSpec, message: str) -> None:
    """Out of range, beyond the vocabulary of 10, or too long."""
    with pytest.raises(ValueError, match=message):
        read_sampling(spec, vocab_size=10)


def test_stop_tokens_that_the_model_lacks_are_left_out() -> None:
    """A tokenizer may have an end token beyond the model's vocabulary; it never comes."""
    spec = pb.SamplingSpec(stop_token_ids=[2**32 - 1, 3, 10, 3])
    assert read_sampling(spec, vocab_size=10).stop_ids.tolist() == [3]


def test_what_is_not_said_changes_nothing() -> None:
    """An empty spec is greedy and asks for no change of logits."""
    sampling = read_sampling(pb.SamplingSpec(), vocab_size=10)
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (0, 1, 1)
    assert not sampling.edits
    assert read_sampling(EVERYTHING, vocab_size=128).edits
