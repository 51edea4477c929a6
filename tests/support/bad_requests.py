"""Requests that a client could send by mistake or on purpose, and the error each must get.

The model of the tests has a context of 512 tokens, a vocabulary of 320 and a tokenizer.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tests.support.api import Json

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
CONTEXT = 512
VOCABULARY = 320


@dataclass(frozen=True)
class BadRequest:
    """A request and its right answer."""

    name: str
    body: bytes
    code: str
    param: str | None = None
    status: int = 400
    method: str = "POST"
    path: str = COMPLETIONS
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})


def _completion(name: str, code: str, param: str | None, **fields: Json) -> BadRequest:
    body = {"prompt": "hello", "max_tokens": 2, **fields}
    return BadRequest(name, json.dumps(body).encode(), code, param)


def _chat(name: str, code: str, param: str | None, **fields: Json) -> BadRequest:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, **fields}
    return BadRequest(name, json.dumps(body).encode(), code, param, path=CHAT)


def _raw(
    name: str, body: bytes, code: str = "invalid_json", param: str | None = None
) -> BadRequest:
    return BadRequest(name, body, code, param)


def not_json() -> Iterator[BadRequest]:
    """Bodies that are not one JSON object in UTF-8."""
    yield _raw("empty", b"")
    yield _raw("cut", b'{"prompt": "hel')
    yield _raw("null", b"null")
    yield _raw("array", b"[]")
    yield _raw("string", b'"prompt"')
    yield _raw("number", b"17")
    yield _raw("trailing text", b'{"prompt": "a"} {"prompt": "b"}')
    yield _raw("byte order mark", b'\xef\xbb\xbf{"prompt": "a"}')
    yield _raw("single quotes", b"{'prompt': 'a'}")
    twice = b'{"prompt": "a", "max_tokens": 1, "max_tokens": 100000}'
    yield _raw("duplicate key", twice, param="max_tokens")
    yield _raw(
        "deep array", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "json_too_deep"
    )
    yield _raw("deep object", b'{"a":' * 1000 + b"1" + b"}" * 1000, "json_too_deep")
    yield _raw("utf-16", '{"prompt": "a"}'.encode("utf-16"), "invalid_unicode")
    yield _raw("invalid utf-8", b'{"prompt": "\xff\xfe"}', "invalid_unicode")
    yield _raw("cut utf-8", b'{"prompt": "\xe2\x82"}', "invalid_unicode")
    yield _raw("lone surrogate", b'{"prompt": "\\ud800"}', "invalid_unicode")
    yield _raw("lone surrogate key", b'{"prompt": "a", "\\udfff": 1}', "invalid_unicode")


def numbers() -> Iterator[BadRequest]:
    """Numbers that JSON or the parameter does not allow."""
    for literal in ("NaN", "Infinity", "-Infinity"):
        body = f'{{"prompt": "a", "temperature": {literal}}}'.encode()
        yield _raw(f"temperature {literal}", body)
    for literal in ("1e999", "-1e999", "9" * 5000):
        body = f'{{"prompt": "a", "temperature": {literal}}}'.encode()
        yield _raw(f"temperature {literal[:6]}", body, "invalid_value", "temperature")
    digits = f'{{"prompt": "a", "max_tokens": {"9" * 5000}}}'.encode()
    yield _raw("max_tokens of 5000 digits", digits, "invalid_value", "max_tokens")


def parameters() -> Iterator[BadRequest]:
    """Values of a wrong type or out of range, one parameter at a time."""
    wrong: dict[str, list[Json]] = {
        "max_tokens": [0, -1, 2**63, 1.5, "5", True, [1]],
        "temperature": [-0.5, 1e308, "hot", True, []],
        "top_p": [0, -1, 1.5, "x", True],
        "top_k": [-5, 2**40, 1.5, "1", True],
        "seed": [1.5, "x", 2**64, True],
        "stop": [5, "", [""], [1], ["x"] * 17, "x" * 2000, {"a": 1}],
        "logprobs": [-1, 21, 10**9, 1.5, "1"],
        "stream": ["yes", 1],
        "ignore_eos": ["no", 1],
        "return_token_ids": ["no", 1],
        "n": [0, -1, 10**9, "1", 1.5],
        "model": [5, ["a"], {}],
    }
    for param, values in wrong.items():
        for value in values:
            name = f"{param} {json.dumps(value)[:20]}"
            yield _completion(name, "invalid_value", param, **{param: value})
    yield _completion("stream_options alone", "invalid_value", "stream_options", stream_options={})
    yield _completion(
        "stream_options 5", "invalid_value", "stream_options", stream=True, stream_options=5
    )
    yield _completion(
        "include_usage text",
        "invalid_value",
        "stream_options.include_usage",
        stream=True,
        stream_options={"include_usage": "yes"},
    )


def sampling() -> Iterator[BadRequest]:
    """What the newer parameters of sampling and stopping do not take."""
    wrong: dict[str, list[Json]] = {
        "min_p": [-0.1, 1.1, "x", True],
        "repetition_penalty": [0, -1, 101, "x", True],
        "presence_penalty": [-2.1, 2.1, "x", True],
        "frequency_penalty": [-2.1, 2.1, "x", True],
        "logit_bias": [[1], "x", 5, {"1": 101}, {"1": -101}, {"1": "x"}, {"1": True}, {"1": None}],
        "allowed_token_ids": [[], [-1], ["1"], 5, [1.5]],
        "bad_words": [[""], [" "], "x", [5], ["x"] * 257],
        "min_tokens": [-1, 1.5, "1", 3],
        "stop_token_ids": [5, [-1], ["1"], [0] * 1025, [True]],
        "include_stop_str_in_output": ["yes", 1],
        "skip_special_tokens": ["yes", 1],
        "spaces_between_special_tokens": ["yes", 1],
        "return_tokens_as_token_ids": ["yes", 1],
        "return_routed_experts": ["yes", 1],
        "routed_experts_prompt_start": [-1, "x", 6],
        "prompt_logprobs": [-1, 21, "x", True],
        "echo": ["yes", 1],
        "priority": [1.5, "x", 2**40],
        "request_id": ["", "a b", "a\n", "x" * 129, 5],
        "cache_salt": ["", "a@b", "a/b", "a\\b", "a\0b", "x" * 129, 5],
        "truncate_prompt_tokens": [0, -2, CONTEXT + 1, "x", 1.5],
        "truncation_side": ["middle", 1],
        "timeout_s": [0, -1, "x", 1e9, True],
        "add_special_tokens": ["yes", 1],
    }
    for param, values in wrong.items():
        for value in values:
            name = f"{param} {json.dumps(value)[:20]}"
            yield _completion(name, "invalid_value", param, **{param: value})
    for param, ids in {
        "logit_bias": {str(VOCABULARY): 1},
        "allowed_token_ids": [1, VOCABULARY],
        "stop_token_ids": [VOCABULARY],
    }.items():
        yield _completion(f"{param} outside", "invalid_token_id", param, **{param: ids})
    for key in ("x", "-1", "1.0", " 1", "\u0661", "9" * 30):
        yield _completion(f"bias {key!r}", "invalid_token_id", "logit_bias", logit_bias={key: 1})
    yield _completion("bias twice", "invalid_value", "logit_bias", logit_bias={"1": 1, "01": 2})
    yield _completion(
        "many biases",
        "invalid_value",
        "logit_bias",
        logit_bias=dict.fromkeys(map(str, range(1025)), 1),
    )
    yield _completion(
        "only stop tokens",
        "invalid_value",
        "allowed_token_ids",
        min_tokens=1,
        allowed_token_ids=[7],
        stop_token_ids=[7],
    )
    yield _completion(
        "streamed prompt logprobs",
        "invalid_value",
        "prompt_logprobs",
        stream=True,
        prompt_logprobs=1,
    )
    yield _completion("many choices", "invalid_value", "prompt", prompt=["a"] * 9, n=128)
    yield _chat("min_tokens", "invalid_value", "min_tokens", min_tokens=3)


def unsupported() -> Iterator[BadRequest]:
    """Known parameters that this server does not have are refused, not ignored."""
    for param, value in {
        "best_of": 3,
        "suffix": "end",
        "use_beam_search": True,
        "logprob_token_ids": [1],
        "prompt_embeds": "x",
        "stream_interval": 5,
        "vllm_xargs": {"a": 1},
    }.items():
        yield _completion(f"unsupported {param}", "unsupported_parameter", param, **{param: value})
    for param, value in {
        "functions": [{"name": "f"}],
        "chat_template": "{{ 1 }}",
        "echo": True,
        "add_special_tokens": True,
    }.items():
        yield _chat(f"unsupported chat {param}", "unsupported_parameter", param, **{param: value})


def prompts() -> Iterator[BadRequest]:
    """Prompts that cannot be continued."""
    yield _raw("no prompt", b'{"max_tokens": 2}', "invalid_value", "prompt")
    for name, value, code in (
        ("null", None, "invalid_value"),
        ("number", 5, "invalid_value"),
        ("object", {"a": 1}, "invalid_value"),
        ("mixed list", [1, "a"], "invalid_token_id"),
        ("mixed texts", ["a", 1], "invalid_value"),
        ("nested text", [["a"]], "invalid_token_id"),
        ("empty text", "", "empty_prompt"),
        ("empty list", [], "empty_prompt"),
        ("list of an empty list", [[]], "empty_prompt"),
        ("list with an empty text", ["a", ""], "empty_prompt"),
        ("negative id", [3, -1], "invalid_token_id"),
        ("id of the vocabulary size", [3, VOCABULARY], "invalid_token_id"),
        ("huge id", [2**70], "invalid_token_id"),
        ("fractional id", [1.5], "invalid_token_id"),
        ("true as id", [3, True], "invalid_token_id"),
        ("good and bad", [[3, 4], [3, VOCABULARY]], "invalid_token_id"),
        ("too many", ["a"] * 1025, "invalid_value"),
    ):
        yield _completion(f"prompt {name}", code, "prompt", prompt=value)


def lengths() -> Iterator[BadRequest]:
    """Prompts and answers longer than the context."""
    code = "context_length_exceeded"
    yield _completion("long ids", code, "prompt", prompt=[5] * (CONTEXT + 1))
    yield _completion("full context", code, "prompt", prompt=[5] * CONTEXT, max_tokens=1)
    yield _completion("long text", code, "prompt", prompt="word " * 5000)
    yield _completion("sum too long", code, "max_tokens", prompt=[5] * 500, max_tokens=13)
    long = [{"role": "user", "content": "word " * 5000}]
    yield _chat("long chat", code, "messages", messages=long)


def chats() -> Iterator[BadRequest]:
    """Conversations that have no meaning."""
    yield BadRequest("no messages", b"{}", "invalid_value", "messages", path=CHAT)
    user = {"role": "user", "content": "hi"}
    image = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
    for name, value, code, param in (
        ("null", None, "invalid_value", "messages"),
        ("text", "hi", "invalid_value", "messages"),
        ("empty", [], "invalid_value", "messages"),
        ("number", [5], "invalid_value", "messages.0"),
        ("no role", [{"content": "a"}], "invalid_value", "messages.0.role"),
        ("role", [user, {"role": "king", "content": "a"}], "invalid_value", "messages.1.role"),
        (
            "null content",
            [{"role": "user", "content": None}],
            "invalid_value",
            "messages.0.content",
        ),
        ("content number", [{"role": "user", "content": 5}], "invalid_value", "messages.0.content"),
        (
            "image",
            [{"role": "user", "content": [image]}],
            "unsupported_content_type",
            "messages.0.content.0",
        ),
    ):
        yield _chat(f"messages {name}", code, param, messages=value)
    both = {"add_generation_prompt": True, "continue_final_message": True}
    yield _chat("both ends", "invalid_value", "continue_final_message", **both)
    for name, value in (("list", [1]), ("own", {"messages": []}), ("global", {"range": 1})):
        kwargs = {"chat_template_kwargs": value}
        yield _chat(f"variables {name}", "invalid_value", "chat_template_kwargs", **kwargs)
    yield _chat("top_logprobs alone", "invalid_value", "top_logprobs", top_logprobs=3)
    yield _chat("top_logprobs 21", "invalid_value", "top_logprobs", logprobs=True, top_logprobs=21)
    yield _chat("logprobs 5", "invalid_value", "logprobs", logprobs=5)
    yield _chat("max 0", "invalid_value", "max_completion_tokens", max_completion_tokens=0)


def models() -> Iterator[BadRequest]:
    """Names of models that are not served."""
    for name, value in (
        ("unknown", "gpt-unknown"),
        ("path", "../../etc/passwd"),
        ("long", "x" * 1_000_000),
        ("newline", "a\r\nSet-Cookie: b=c"),
    ):
        body = json.dumps({"model": value, "prompt": "hello"}).encode()
        yield BadRequest(f"model {name}", body, "model_not_found", "model", status=404)


def routes() -> Iterator[BadRequest]:
    """Paths, methods and encodings that do not exist."""
    good = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
    yield BadRequest("no such path", good, "not_found", status=404, path="/v1/nothing")
    yield BadRequest("root", b"", "not_found", status=404, path="/", method="GET")
    yield BadRequest("dots", good, "not_found", status=404, path="/v1/../completions")
    yield BadRequest("GET", b"", "method_not_allowed", status=405, method="GET")
    yield BadRequest("DELETE", b"", "method_not_allowed", status=405, method="DELETE")
    yield BadRequest(
        "plain text",
        good,
        "unsupported_media_type",
        status=415,
        headers={"Content-Type": "text/plain"},
    )
    for encoding in ("gzip", "deflate", "br", "zstd"):
        yield BadRequest(
            f"{encoding} body",
            gzip.compress(good),
            "unsupported_content_encoding",
            status=415,
            headers={"Content-Type": "application/json", "Content-Encoding": encoding},
        )
    yield BadRequest(
        "compressed bomb",
        gzip.compress(b" " * 50_000_000),
        "unsupported_content_encoding",
        status=415,
        headers={"Content-Type": "application/json", "Content-Encoding": "gzip"},
    )


def corpus() -> list[BadRequest]:
    """All of them."""
    sources = (
        not_json,
        numbers,
        parameters,
        sampling,
        unsupported,
        prompts,
        lengths,
        chats,
        models,
        routes,
    )
    return [request for source in sources for request in source()]
