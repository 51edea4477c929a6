"""What is refused: the status, the parameter's name and the code, in the envelope of the schema."""

from __future__ import annotations

import pytest

from tests.support.api import Json
from tests.support.strict_client import CHAT, CONTEXT_LEN, HELLO, TEXT, StrictClient, error_of

COMMON: list[tuple[str, Json]] = [
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("temperature", 2.1),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("frequency_penalty", "much"),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", "4"),
    ("max_tokens", True),
    ("n", 0),
    ("n", -1),
    ("n", "2"),
    ("n", 10_000),
    ("stop", 3),
    ("stop", [1]),
    ("stop", ["x"] * 100),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("min_tokens", -1),
    ("seed", "one"),
    ("seed", 1.5),
    ("stream", "yes"),
    ("stream", 1),
    ("stream_options", {"include_usage": True}),
    ("ignore_eos", "yes"),
    ("skip_special_tokens", 2),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "poem"}),
    ("response_format", "json_object"),
    ("structured_outputs", {"regex": "a", "choice": ["a"]}),
    ("structured_outputs", {"regex": "("}),
    ("logprobs", -2),
    ("model", 3),
    ("priority", "high"),
]


def _case_id(value: Json) -> str:
    return str(value)[:24].replace(" ", "")


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("param", "value"), COMMON, ids=_case_id)
def test_bad_parameter(client: StrictClient, path: str, param: str, value: Json) -> None:
    """The parameter is named, in the field for it and in the message."""
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
    error = client.refused(path, {**prompt, param: value})
    assert error["type"] == "invalid_request_error"
    assert error["param"].split(".")[0] == param
    assert param in error["message"]
    assert isinstance(error["code"], str)


BAD_CHATS: list[tuple[str, Json]] = [
    ("messages", {}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "hello"}),
    ("messages", {"messages": [3]}),
    ("messages.0.role", {"messages": [{"content": "x"}]}),
    ("messages.0.role", {"messages": [{"role": "king", "content": "x"}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": 3}]}),
    ("messages.0.content", {"messages": [{"role": "user"}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": None}]}),
    ("messages.1.role", {"messages": [*HELLO, {"role": "king", "content": "x"}]}),
    (
        "messages.0.content.0",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    ),
    ("top_logprobs", {"messages": HELLO, "logprobs": True, "top_logprobs": 21}),
    ("top_logprobs", {"messages": HELLO, "top_logprobs": 2}),
    ("max_completion_tokens", {"messages": HELLO, "max_completion_tokens": -1}),
    ("max_tokens", {"messages": HELLO, "max_tokens": 0}),
    ("tools", {"messages": HELLO, "tools": []}),
    ("tools.0", {"messages": HELLO, "tools": [{"type": "magic"}]}),
    ("tool_choice", {"messages": HELLO, "tool_choice": "required"}),
    ("response_format", {"messages": HELLO, "response_format": {"type": "json_schema"}}),
]


@pytest.mark.parametrize(("param", "body"), BAD_CHATS, ids=_case_id)
def test_bad_chat(client: StrictClient, param: str, body: Json) -> None:
    """Messages are named by their index, with the path of what is wrong in them."""
    error = client.refused(CHAT, body)
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(param)


BAD_PROMPTS: list[Json] = [
    {},
    *({"prompt": prompt} for prompt in (None, "", [], [""], [[]], 3, {}, [1.5], ["a", 3])),
    *({"prompt": prompt} for prompt in ([320], [-1], [[5], [320]], [True])),
]


@pytest.mark.parametrize("body", BAD_PROMPTS, ids=str)
def test_bad_prompt(client: StrictClient, body: Json) -> None:
    """Neither a text, nor token ids of the model, nor a list of one of them."""
    error = client.refused(TEXT, body)
    assert error["param"] == "prompt"
    assert error["type"] == "invalid_request_error"


def test_too_long_for_the_context(client: StrictClient) -> None:
    """Prompt, or prompt and answer, over the context; the numbers are in the message."""
    for path, body, param in (
        (TEXT, {"prompt": [5] * (CONTEXT_LEN + 1)}, "prompt"),
        (TEXT, {"prompt": [5] * 500, "max_tokens": CONTEXT_LEN}, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "a " * CONTEXT_LEN}]}, "messages"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": CONTEXT_LEN}, "max_completion_tokens"),
    ):
        error = client.refused(path, body)
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == param
        assert str(CONTEXT_LEN) in error["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_unknown_model(client: StrictClient, path: str) -> None:
    """404, and no other model instead."""
    error = client.refused(path, {"model": "gpt-9", "messages": HELLO, "prompt": "x"}, 404)
    assert (error["type"], error["code"], error["param"]) == (
        "not_found_error",
        "model_not_found",
        "model",
    )


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "body", [b"[]", b'"x"', b"1", b"null", b"true", b"", b"{", b"\xff", b'{"a":1}x', b"{'a':1}"]
)
def test_body_that_is_no_object(client: StrictClient, path: str, body: bytes) -> None:
    """400 with a code, never 500."""
    answer = client.api.request("POST", path, body, client.headers)
    assert error_of(answer, 400)["code"] in ("invalid_json", "invalid_unicode")


def test_refused_before_the_stream(client: StrictClient) -> None:
    """An error before the first token is a status, not an event in a stream."""
    error = client.refused(CHAT, {"messages": HELLO, "stream": True, "temperature": -1})
    assert error["param"] == "temperature"
    client.refused(TEXT, {"prompt": [5] * CONTEXT_LEN, "stream": True})


def test_wrong_media_type(client: StrictClient) -> None:
    """415 for what does not claim to be JSON."""
    answer = client.api.request("POST", CHAT, b"<x/>", {"Content-Type": "text/xml"})
    assert error_of(answer, 415)["code"] == "unsupported_media_type"


def test_wrong_method(client: StrictClient) -> None:
    """405 says what is allowed."""
    answer = client.api.get(CHAT)
    assert error_of(answer, 405)["code"] == "method_not_allowed"
    assert "POST" in answer.headers["allow"]
    error_of(client.post("/v1/models", {}), 405)


def test_unknown_endpoint(client: StrictClient) -> None:
    """404 in the same envelope."""
    for path in ("/v1/embeddings", "/v1", "/v2/chat", "/nothing"):
        assert error_of(client.post(path, {}), 404)["type"] == "not_found_error"


def test_body_too_large(client: StrictClient) -> None:
    """413 for bodies over the limit, refused by their announced length."""
    headers = {**client.headers, "Content-Length": str(2**30)}
    answer = client.api.request("POST", CHAT, b"{", headers)
    assert error_of(answer, 413)["code"] == "request_too_large"
