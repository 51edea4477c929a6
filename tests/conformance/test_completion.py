"""/v1/completions: prompts in all forms, several answers, echo, log probabilities."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest

from tests.support.api import Json
from tests.support.strict_client import CONTEXT_LEN, TEXT, StrictClient, joined_text, joined_tokens

PROMPT = "The quick brown"


def _text(answer: Json, index: int = 0) -> str:
    text = answer["choices"][index]["text"]
    assert isinstance(text, str)
    return text


def _ids(client: StrictClient, text: str) -> list[int]:
    answer = client.complete(text, return_token_ids=True)
    ids = answer["choices"][0]["prompt_token_ids"]
    assert isinstance(ids, list)
    return ids


def test_whole_answer(client: StrictClient) -> None:
    """Every field of a choice is there; 16 tokens unless said otherwise."""
    answer = client.complete(max_tokens=None)
    (choice,) = answer["choices"]
    assert choice["logprobs"] is None
    assert choice["finish_reason"] == "length"
    assert choice["stop_reason"] is None
    assert answer["usage"]["completion_tokens"] == 16


def test_stream_adds_up_to_the_whole(client: StrictClient) -> None:
    """The pieces are those of the whole answer, in order."""
    whole = client.complete(max_tokens=24)
    chunks = client.text_stream(max_tokens=24, stream_options={"include_usage": True})
    assert joined_text(chunks) == (_text(whole), "length")
    assert chunks[-1]["usage"]["completion_tokens"] == 24
    assert len(chunks) > 10


def test_four_forms_of_a_prompt(client: StrictClient) -> None:
    """Text, a list of texts, token ids, a list of lists of them: the same answer."""
    ids = _ids(client, PROMPT)
    answers = [client.complete(prompt) for prompt in (PROMPT, [PROMPT], ids, [ids])]
    assert len({_text(answer) for answer in answers}) == 1
    assert {answer["usage"]["prompt_tokens"] for answer in answers} == {len(ids)}


def test_several_prompts(client: StrictClient) -> None:
    """One choice a prompt, in their order, as each would be answered alone; usage is the sum."""
    prompts = ["one", "The lazy dog", "0 1 2"]
    answer = client.complete(prompts)
    assert [_text(answer, index) for index in range(3)] == [
        _text(client.complete(prompt)) for prompt in prompts
    ]
    assert answer["usage"]["prompt_tokens"] == sum(len(_ids(client, text)) for text in prompts)
    chunks = client.text_stream(prompts)
    for index in range(3):
        assert joined_text(chunks, index) == (_text(answer, index), "length")


def test_several_prompts_and_choices(client: StrictClient) -> None:
    """n answers for each prompt: first all those of the first prompt."""
    fields = {"temperature": 1, "seed": 3, "max_tokens": 8}
    answer = client.complete(["one", "two"], n=2, **fields)
    assert len({_text(answer, index) for index in range(4)}) == 4
    first = client.complete("one", n=2, **fields)
    assert [_text(first, index) for index in range(2)] == [_text(answer, i) for i in range(2)]
    assert answer["usage"]["completion_tokens"] == 32
    assert answer["usage"]["prompt_tokens"] == len(_ids(client, "one")) + len(_ids(client, "two"))


def test_best_of(client: StrictClient) -> None:
    """Gone from the API but for the value that means nothing."""
    assert len(client.complete(n=2, best_of=2)["choices"]) == 2
    assert client.refused(TEXT, {"prompt": "x", "best_of": 3})["param"] == "best_of"


def test_suffix(client: StrictClient) -> None:
    """Only models for filling in have it."""
    assert client.refused(TEXT, {"prompt": "x", "suffix": "y"})["param"] == "suffix"


def test_echo(client: StrictClient) -> None:
    """The prompt comes first, whole and streamed, given as text or as token ids."""
    expected = PROMPT + _text(client.complete())
    assert _text(client.complete(echo=True)) == expected
    assert _text(client.complete(_ids(client, PROMPT), echo=True)) == expected
    assert joined_text(client.text_stream(echo=True)) == (expected, "length")


def test_echo_alone(client: StrictClient) -> None:
    """No tokens at all may be asked for with echo: the prompt, and no more."""
    answer = client.complete(echo=True, max_tokens=0)
    assert _text(answer) == PROMPT
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert joined_text(client.text_stream(echo=True, max_tokens=0)) == (PROMPT, "length")
    client.refused(TEXT, {"prompt": PROMPT, "max_tokens": 0})


def _check_offsets(text: str, logprobs: Json, count: int) -> None:
    """All four arrays have one entry a token, and offsets point at the tokens in the text."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    assert [len(logprobs[name]) for name in names] == [count] * 4
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert text[offset : offset + len(token)] == token
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


def test_logprobs(client: StrictClient) -> None:
    """Arrays in step with the tokens; the chosen token is always among its candidates."""
    answer = client.complete("The quick", max_tokens=10, logprobs=3, temperature=1, seed=4)
    logprobs = answer["choices"][0]["logprobs"]
    _check_offsets(_text(answer), logprobs, 10)
    for index, candidates in enumerate(logprobs["top_logprobs"]):
        chosen, value = logprobs["tokens"][index], logprobs["token_logprobs"][index]
        assert candidates[chosen] == value
        assert 3 <= len(candidates) <= 4


def test_logprobs_without_candidates(client: StrictClient) -> None:
    """0 candidates: the chosen token's own probability alone."""
    logprobs = client.complete(logprobs=0)["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == 4
    expected = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    assert logprobs["top_logprobs"] == [{token: value} for token, value in expected]


def test_streamed_logprobs(client: StrictClient) -> None:
    """Chunks have the arrays of the whole answer, offsets included."""
    whole = client.complete(max_tokens=10, logprobs=2)["choices"][0]["logprobs"]
    chunks = client.text_stream(max_tokens=10, logprobs=2)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [entry for part in parts if part for entry in part[name]] == whole[name]


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_echo_with_logprobs(client: StrictClient, max_tokens: int) -> None:
    """What lm-eval does: probabilities of the prompt; its first token has none."""
    ids = _ids(client, "The quick brown fox")
    answer = client.complete([ids], echo=True, logprobs=1, max_tokens=max_tokens)
    logprobs = answer["choices"][0]["logprobs"]
    _check_offsets(_text(answer), logprobs, len(ids) + max_tokens)
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    step = client.complete(ids[:-1], logprobs=20)["choices"][0]["logprobs"]
    last = logprobs["tokens"][len(ids) - 1]
    if last in step["top_logprobs"][0]:
        expected = step["top_logprobs"][0][last]
        assert logprobs["token_logprobs"][len(ids) - 1] == pytest.approx(expected, abs=1e-4)
    assert _text(answer).startswith("The quick brown fox")


def test_streamed_echo_with_logprobs(client: StrictClient) -> None:
    """The same arrays, in pieces."""
    whole = client.complete(echo=True, logprobs=1)["choices"][0]["logprobs"]
    chunks = client.text_stream(echo=True, logprobs=1)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [entry for part in parts if part for entry in part[name]] == whole[name]


def test_prompt_logprobs(client: StrictClient) -> None:
    """For each prompt token its candidates by id, null for the first; not in streams."""
    ids = _ids(client, PROMPT)
    answer = client.complete(prompt_logprobs=2)
    entries = answer["choices"][0]["prompt_logprobs"]
    assert len(entries) == len(ids)
    assert entries[0] is None
    for token_id, entry in zip(ids[1:], entries[1:], strict=True):
        assert 2 <= len(entry) <= 3
        assert {"logprob", "rank", "decoded_token"} <= set(entry[str(token_id)])
    body = {"prompt": "x", "prompt_logprobs": 1, "stream": True}
    assert client.refused(TEXT, body)["param"] == "prompt_logprobs"


def test_token_ids(client: StrictClient) -> None:
    """Ids of prompt and answer, whole and streamed."""
    ids = _ids(client, PROMPT)
    whole = client.complete(return_token_ids=True)["choices"][0]
    assert whole["prompt_token_ids"] == ids
    assert len(whole["token_ids"]) == 4
    chunks = client.text_stream(return_token_ids=True)
    assert joined_tokens(chunks) == whole["token_ids"]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == ids
    assert all("prompt_token_ids" not in chunk["choices"][0] for chunk in chunks[1:])


def test_tokens_as_ids(client: StrictClient) -> None:
    """Log probabilities may name tokens by their ids."""
    fields = {"logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = client.complete(**fields)["choices"][0]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    assert all(key.startswith("token_id:") for key in choice["logprobs"]["top_logprobs"][0])


def test_truncated_prompt(client: StrictClient) -> None:
    """The last tokens of a prompt that is too long are kept."""
    ids = _ids(client, "The quick brown fox jumps over the lazy dog.")
    answer = client.complete(ids, truncate_prompt_tokens=3, return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == ids[-3:]
    assert answer["usage"]["prompt_tokens"] == 3
    assert _text(answer) == _text(client.complete(ids[-3:]))


def test_special_tokens_in_the_text(client: StrictClient, eos_token_id: int) -> None:
    """Special tokens are shown only if asked for."""
    fields = {"logit_bias": {str(eos_token_id): 100}, "max_tokens": 2}
    assert _text(client.complete(**fields)) == ""
    assert _text(client.complete(**fields, skip_special_tokens=False)) == "<|im_end|>" * 2


def test_cached_prompt(client: StrictClient) -> None:
    """A prompt that was here before is partly in the cache, unless its salt is another."""
    prompt = list(range(10, 90))
    first = client.complete(prompt, cache_salt="a")
    again = client.complete(prompt, cache_salt="a")
    other = client.complete(prompt, cache_salt="b")
    cached = [
        answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        for answer in (first, again, other)
    ]
    assert cached[0] == cached[2] == 0
    assert 40 <= cached[1] < 80
    assert _text(first) == _text(again) == _text(other)
    assert client.refused(TEXT, {"prompt": "x", "cache_salt": "a/b"})["param"] == "cache_salt"


def test_routed_experts(client: StrictClient) -> None:
    """The experts of each token but the last: [tokens - 1, MoE layers, top-k], an .npy file."""
    ids = _ids(client, PROMPT)
    choice = client.complete(return_routed_experts=True)["choices"][0]
    experts = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    assert experts.shape == (len(ids) + 4 - 1, 3, 2)
    assert experts.max() < 8
    assert (experts[..., 0] != experts[..., 1]).all()
    assert "routed_experts" not in client.complete()["choices"][0]


def test_fields_of_other_servers(client: StrictClient) -> None:
    """What changes nothing here is taken."""
    answer = client.complete(
        user="ada", priority=3, request_id="my-id", session_id="s", add_special_tokens=True
    )
    assert _text(answer) == _text(client.complete())


def test_finish_reason_at_the_end_of_the_context(client: StrictClient) -> None:
    """The default length ends with the context."""
    answer = client.complete([5] * (CONTEXT_LEN - 7), max_tokens=None)
    assert answer["usage"]["total_tokens"] == CONTEXT_LEN
    assert answer["choices"][0]["finish_reason"] == "length"
