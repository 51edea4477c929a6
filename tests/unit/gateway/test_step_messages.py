"""What the scheduler decides reaches the attention worker whole."""

from __future__ import annotations

from gateway.engine.request_state import ScheduledStep, SlotOpening
from gateway.engine.step_messages import step_message
from gateway.sequence import SamplingParams

PARAMS = SamplingParams(
    max_tokens=9,
    temperature=0.5,
    top_p=0.75,
    top_k=3,
    seed=2**63,
    min_p=0.25,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=0.125,
    logit_bias=((5, -1.5), (6, 2.0)),
    allowed_token_ids=(5, 6, 7),
    bad_words=((5,), (6, 7)),
    min_tokens=2,
    stop_token_ids=(7,),
    num_logprobs=0,
    num_prompt_logprobs=4,
    return_routed_experts=True,
    grammar="start: /a/",
)


def _spec(params: SamplingParams) -> dict[str, object]:
    opening = SlotOpening(
        slot=0, token_ids=(1, 2), num_prompt_tokens=2, num_cached=1, params=params
    )
    step = ScheduledStep(step=1, freed_slots=(), opened=(opening,), entries=())
    spec = step_message(step, 0, eos_token_ids={1}).new_requests[0].sampling
    return {
        field.name: value
        for field, value in spec.ListFields()
        if field.name not in ("logit_bias", "bad_words")
    } | {
        "logit_bias": [(bias.token_id, bias.bias) for bias in spec.logit_bias],
        "bad_words": [list(word.ids) for word in spec.bad_words],
    }


def test_every_sampling_parameter_is_sent() -> None:
    """As it was given; the tokens that end the output are those of model and request."""
    assert _spec(PARAMS) == {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 3,
        "seed": 2**63,
        "num_logprobs": 0,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.125,
        "logit_bias": [(5, -1.5), (6, 2.0)],
        "allowed_token_ids": [5, 6, 7],
        "bad_words": [[5], [6, 7]],
        "min_tokens": 2,
        "stop_token_ids": [1, 7],
        "grammar": "start: /a/",
        "num_prompt_logprobs": 4,
        "return_routed_experts": True,
    }


def test_ignored_end_tokens_are_not_sent() -> None:
    """A request that ignores the model's ends with its own tokens only."""
    params = SamplingParams(max_tokens=1, ignore_eos=True, stop_token_ids=(7,))
    assert _spec(params)["stop_token_ids"] == [7]
