"""/v1/chat/completions: what goes in, what comes out, whole and streamed."""

from __future__ import annotations

import pytest

from tests.support.api import Json
from tests.support.strict_client import (
    CHAT,
    CONTEXT_LEN,
    HELLO,
    StrictClient,
    joined_chat,
    joined_tokens,
)

SYSTEM = "Be brief."


def _text(answer: Json, index: int = 0) -> str:
    content = answer["choices"][index]["message"]["content"]
    assert isinstance(content, str)
    return content


def test_whole_answer(client: StrictClient) -> None:
    """Every field of a choice is there, whatever was asked for."""
    answer = client.chat()
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["refusal"] is None
    assert choice["logprobs"] is None
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["object"] == "chat.completion"


def test_stream_adds_up_to_the_whole(client: StrictClient) -> None:
    """The pieces are those of the whole answer, in order."""
    answer = client.chat(max_tokens=24)
    chunks = client.chat_stream(max_tokens=24)
    assert joined_chat(chunks) == (_text(answer), "length")
    assert len(chunks) > 10
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert chunks[0]["model"] == answer["model"]


def test_stream_usage(client: StrictClient) -> None:
    """The last chunk has the usage of the whole answer if asked for, and only then."""
    usage = client.chat()["usage"]
    for wanted in (True, False, None):
        chunks = client.chat_stream(stream_options={"include_usage": wanted})
        assert (chunks[-1].get("usage") is not None) == (wanted is True)
    chunks = client.chat_stream(stream_options={"include_usage": True})
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [chunks[-1]["usage"][name] for name in names] == [usage[name] for name in names]


def test_continuous_usage(client: StrictClient) -> None:
    """Running totals on every chunk, that reach the total."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = client.chat_stream(max_tokens=6, stream_options=options)
    assert all(chunk["usage"] for chunk in chunks)
    assert chunks[-1]["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    "content",
    [[{"type": "text", "text": "hello"}], [{"type": "text", "text": "hello", "extra": 1}]],
)
def test_content_parts(client: StrictClient, content: Json) -> None:
    """Content as a list of text parts is the text."""
    parts = client.chat(messages=[{"role": "user", "content": content}])
    assert _text(parts) == _text(client.chat())
    assert parts["usage"]["prompt_tokens"] == client.chat()["usage"]["prompt_tokens"]


def test_several_text_parts(client: StrictClient) -> None:
    """Several parts are one text with line ends between them."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    joined = client.chat(messages=[{"role": "user", "content": "one\ntwo"}])
    assert _text(client.chat(messages=[{"role": "user", "content": parts}])) == _text(joined)


def test_developer_is_system(client: StrictClient) -> None:
    """The role that OpenAI put in the place of "system" means the same."""
    texts = [
        _text(client.chat(messages=[{"role": role, "content": SYSTEM}, *HELLO]))
        for role in ("system", "developer")
    ]
    assert texts[0] == texts[1]


def test_conversation(client: StrictClient) -> None:
    """Earlier answers are part of the prompt; names and empty texts are fine."""
    turns = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "hello", "name": "ada"},
        {"role": "assistant", "content": "hi", "refusal": None},
        {"role": "user", "content": ""},
    ]
    assert (
        client.chat(messages=turns)["usage"]["prompt_tokens"]
        > client.chat()["usage"]["prompt_tokens"]
    )


_NULLS = (
    *("model", "frequency_penalty", "presence_penalty", "logit_bias", "logprobs", "top_logprobs"),
    *("n", "stop", "stream", "stream_options", "top_p", "top_k", "min_p", "tools", "tool_choice"),
    *("max_completion_tokens", "response_format", "seed", "user", "parallel_tool_calls"),
    *("repetition_penalty", "min_tokens", "stop_token_ids", "structured_outputs", "chat_template"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "metadata"),
)


def test_null_means_absent(client: StrictClient) -> None:
    """null in every optional field is what leaving it out is."""
    assert _text(client.chat(**dict.fromkeys(_NULLS))) == _text(client.chat())


def test_fields_without_a_meaning_here(client: StrictClient) -> None:
    """What OpenAI knows for its own platform, and what nobody knows, changes nothing."""
    answer = client.chat(
        user="ada",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        safety_identifier="x",
        prompt_cache_key="y",
        request_id="my-id",
        nobody_knows={"this": [1]},
    )
    assert _text(answer) == _text(client.chat())


def test_max_completion_tokens_supersedes(client: StrictClient) -> None:
    """The new name wins over the old one."""
    answer = client.chat(max_tokens=9, max_completion_tokens=3)
    assert answer["usage"]["completion_tokens"] == 3


def test_default_length_is_the_rest_of_the_context(client: StrictClient) -> None:
    """Without a limit the answer may fill the context, and then ends for its length."""
    answer = client.chat(messages=[{"role": "user", "content": "a " * 1010}], max_tokens=None)
    assert answer["usage"]["total_tokens"] == CONTEXT_LEN
    assert answer["choices"][0]["finish_reason"] == "length"


def test_end_token(client: StrictClient, eos_token_id: int) -> None:
    """The model's end token ends the answer, is counted, and is no part of the text."""
    fields = {"ignore_eos": False, "max_tokens": 8, "logit_bias": {str(eos_token_id): 100}}
    answer = client.chat(**fields)
    assert _text(answer) == ""
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1
    assert joined_chat(client.chat_stream(**fields)) == ("", "stop")


def _spelled(entries: list[Json]) -> bytes:
    return b"".join(bytes(entry["bytes"]) for entry in entries)


def test_logprobs(client: StrictClient) -> None:
    """One entry a token, whose bytes are the text; candidates fall, the greedy one leads."""
    answer = client.chat(max_tokens=12, logprobs=True, top_logprobs=5)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    content = logprobs["content"]
    assert len(content) == answer["usage"]["completion_tokens"] == 12
    for entry in content:
        values = [candidate["logprob"] for candidate in entry["top_logprobs"]]
        assert len(values) == 5
        assert values == sorted(values, reverse=True)
        assert entry["logprob"] == values[0] <= 0
    assert _spelled(content).decode(errors="replace").startswith(_text(answer).rstrip("\ufffd"))


def test_logprobs_without_candidates(client: StrictClient) -> None:
    """0 and null candidates: the token's own entry alone."""
    for count in (0, None):
        answer = client.chat(logprobs=True, top_logprobs=count)
        entries = answer["choices"][0]["logprobs"]["content"]
        assert len(entries) == 4
        assert all(entry["top_logprobs"] == [] for entry in entries)
    assert client.chat(logprobs=False)["choices"][0]["logprobs"] is None


def test_streamed_logprobs(client: StrictClient) -> None:
    """Chunks have the entries of the whole answer."""
    whole = client.chat(max_tokens=10, logprobs=True, top_logprobs=2)
    chunks = client.chat_stream(max_tokens=10, logprobs=True, top_logprobs=2)
    logprobs = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    entries = [entry for part in logprobs if part for entry in part["content"]]
    assert entries == whole["choices"][0]["logprobs"]["content"]


def test_several_choices(client: StrictClient) -> None:
    """n answers, each of its own; the prompt is counted once."""
    one = client.chat(temperature=1, seed=1)
    answer = client.chat(n=3, temperature=1, seed=1, max_tokens=8)
    assert len(answer["choices"]) == 3
    assert len({_text(answer, index) for index in range(3)}) == 3
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]


def test_several_choices_streamed(client: StrictClient) -> None:
    """Chunks of n answers are told apart by their index, and are those of the whole answer."""
    fields = {"n": 3, "temperature": 1, "seed": 1, "max_tokens": 8}
    whole = client.chat(**fields)
    chunks = client.chat_stream(**fields, stream_options={"include_usage": True})
    for index in range(3):
        assert joined_chat(chunks, index) == (_text(whole, index), "length")
    assert chunks[-1]["usage"]["completion_tokens"] == 24


def test_seed(client: StrictClient) -> None:
    """The same seed gives the same answer and fingerprint, another one another answer."""
    answers = [client.chat(temperature=1, seed=seed, max_tokens=16) for seed in (7, 7, 8)]
    assert _text(answers[0]) == _text(answers[1]) != _text(answers[2])
    assert len({answer["system_fingerprint"] for answer in answers}) == 1


def test_no_seed(client: StrictClient) -> None:
    """Without a seed answers differ."""
    assert len({_text(client.chat(temperature=1, max_tokens=16)) for _ in range(3)}) > 1


@pytest.mark.parametrize("as_list", [False, True])
def test_stop_string(client: StrictClient, as_list: bool) -> None:
    """A stop string ends the answer before it, and is named."""
    free = _text(client.chat(max_tokens=40))
    stop = next(free[i : i + 2] for i in range(8, 30) if "\ufffd" not in free[i : i + 2])
    fields = {"max_tokens": 40, "stop": [stop, "never"] if as_list else stop}
    answer = client.chat(**fields)
    assert _text(answer) == free[: free.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] == stop
    assert joined_chat(client.chat_stream(**fields)) == (_text(answer), "stop")
    kept = client.chat(**fields, include_stop_str_in_output=True)
    assert _text(kept) == _text(answer) + stop


def test_continue_final_message(client: StrictClient) -> None:
    """The last message may be one of the assistant that goes on."""
    begun = [*HELLO, {"role": "assistant", "content": "The quick"}]
    fields = {"messages": begun, "add_generation_prompt": False, "return_token_ids": True}
    going_on = client.chat(**fields, continue_final_message=True)
    closed = client.chat(**fields)
    length = len(going_on["prompt_token_ids"])
    assert going_on["prompt_token_ids"] == closed["prompt_token_ids"][:length]
    assert length < len(closed["prompt_token_ids"])
    both = {"messages": begun, "add_generation_prompt": True, "continue_final_message": True}
    assert client.refused(CHAT, both)["param"] in ("continue_final_message", None)


def test_chat_template_of_a_request(client: StrictClient) -> None:
    """A template is code: none is taken from a request. Its variables are."""
    error = client.refused(CHAT, {"messages": HELLO, "chat_template": "{{ messages }}"})
    assert error["param"] == "chat_template"
    kwargs = {"enable_thinking": False}
    assert _text(client.chat(chat_template_kwargs=kwargs)) == _text(client.chat())


def test_token_ids(client: StrictClient) -> None:
    """Ids of prompt and answer, whole and streamed."""
    whole = client.chat(return_token_ids=True)
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert len(whole["choices"][0]["token_ids"]) == 4
    chunks = client.chat_stream(return_token_ids=True)
    assert joined_tokens(chunks) == whole["choices"][0]["token_ids"]
    with_prompt = [chunk for chunk in chunks if chunk.get("prompt_token_ids")]
    assert len(with_prompt) == 1
    assert with_prompt[0]["prompt_token_ids"] == whole["prompt_token_ids"]


def test_reasoning_of_earlier_turns(client: StrictClient) -> None:
    """An earlier answer may carry its reasoning, under either name."""
    for name in ("reasoning", "reasoning_content"):
        answer = {"role": "assistant", "content": "hi", name: "They greet me."}
        assert _text(client.chat(messages=[*HELLO, answer, *HELLO]))
