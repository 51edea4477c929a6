"""What ends an output, and what is then part of it."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.engine.engine_observer import EngineObserver
from gateway.engine.output_stream import NewToken, OutputStream
from gateway.engine.request_state import RequestState
from gateway.sequence import FinishReason, GenerationRequest, RequestOutput, SamplingParams
from gateway.service import merge
from tests.support.scripted_engine import byte_tokenizer

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_ids[0]
CONTEXT = 64


def generate(text: str, *, end: bool = True, **params: Any) -> RequestOutput:
    """The merged outputs of a request whose model says a text, and then the end token."""
    given = SamplingParams(**{"max_tokens": 50, **params})
    request = GenerationRequest("r", (1, 2), given, lambda output: None, 0.0)
    state = RequestState(request)
    stream = OutputStream(state, TOKENIZER, (EOS,), EngineObserver())
    outputs = []
    for token_id in [*TOKENIZER.encode(text), *([EOS] if end else [])]:
        state.token_ids.append(token_id)
        outputs.append(stream.push([NewToken(token_id)], CONTEXT))
        if outputs[-1].finish_reason is not None:
            return merge(outputs)
    raise AssertionError("nothing ended the output")


def token(letter: str) -> int:
    """Id of a letter."""
    (found,) = TOKENIZER.encode(letter)
    return found


@pytest.mark.parametrize(
    ("params", "text", "reason"),
    [
        ({}, "abcabc", None),
        ({"stop_token_ids": (token("c"),)}, "ab", token("c")),
        ({"stop_token_ids": (token("c"),), "include_stop_str_in_output": True}, "abc", token("c")),
        ({"stop_token_ids": (token("c"),), "min_tokens": 3}, "abcab", token("c")),
        ({"stop_token_ids": (EOS,)}, "abcabc", EOS),
        ({"stop_token_ids": (EOS,), "ignore_eos": True}, "abcabc", EOS),
        ({"stop": ("bc",)}, "a", "bc"),
        ({"stop": ("bc",), "include_stop_str_in_output": True}, "abc", "bc"),
        ({"stop": ("bc",), "min_tokens": 4}, "abca", "bc"),
        ({"stop": ("bc",), "min_tokens": 2}, "a", "bc"),
        ({"stop": ("cab",), "min_tokens": 4}, "abcabc", None),
        ({"include_stop_str_in_output": True}, "abcabc", None),
        (
            {"include_stop_str_in_output": True, "skip_special_tokens": False},
            "abcabc<|im_end|>",
            None,
        ),
        ({"skip_special_tokens": False}, "abcabc", None),
    ],
    ids=str,
)
def test_what_stops_an_output(params: dict[str, Any], text: str, reason: str | int | None) -> None:
    """Text up to what ended it, with it if asked for; the reason names it, if the request did."""
    output = generate("abcabc", **params)
    assert (output.text, output.stop_reason) == (text, reason)
    assert output.finish_reason is FinishReason.STOP


def test_the_limit_ends_an_output_that_goes_on() -> None:
    """Past the end token only the limit ends it; special tokens show if asked for."""
    output = generate("a<|im_end|>b", end=False, ignore_eos=True, max_tokens=3)
    assert (output.text, output.finish_reason) == ("ab", FinishReason.LENGTH)
    shown = generate(
        "a<|im_end|>b", end=False, ignore_eos=True, max_tokens=3, skip_special_tokens=False
    )
    assert shown.text == "a<|im_end|>b"
    assert shown.token_ids == (token("a"), EOS, token("b"))
