"""Parameters that choose tokens or end the answer, seen in the tokens that come out."""

from __future__ import annotations

import pytest

from tests.support.api import Json
from tests.support.strict_client import TEXT, StrictClient

PROMPT = "The quick brown"


def _tokens(client: StrictClient, **fields: Json) -> list[int]:
    choice = client.complete(PROMPT, return_token_ids=True, **fields)["choices"][0]
    tokens = choice["token_ids"]
    assert isinstance(tokens, list)
    return tokens


def _finish(client: StrictClient, **fields: Json) -> tuple[int, str, Json]:
    """Number of tokens, finish reason and stop reason."""
    answer = client.complete(PROMPT, **fields)
    choice = answer["choices"][0]
    return answer["usage"]["completion_tokens"], choice["finish_reason"], choice["stop_reason"]


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_only_the_best_token(client: StrictClient, fields: Json) -> None:
    """Each of these leaves one token to choose from, whatever the temperature."""
    assert _tokens(client, temperature=2, max_tokens=12, **fields) == _tokens(client, max_tokens=12)


def test_neutral_values(client: StrictClient) -> None:
    """The defaults, spelled out, change nothing."""
    neutral = {
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "min_tokens": 0,
        "bad_words": [],
        "stop_token_ids": [],
        "stop": [],
    }
    plain = _tokens(client, temperature=1, seed=2, max_tokens=12)
    assert _tokens(client, temperature=1, seed=2, max_tokens=12, **neutral) == plain
    assert _tokens(client, temperature=1, seed=2, max_tokens=12, top_k=-1) == plain


def test_logit_bias(client: StrictClient) -> None:
    """100 forces a token, -100 bans it."""
    assert _tokens(client, logit_bias={"40": 100}) == [40] * 4
    first = _tokens(client)[0]
    assert first not in _tokens(client, logit_bias={str(first): -100})


@pytest.mark.parametrize(
    "bias", [{"40": 101}, {"40": -100.5}, {"x": 1}, {"320": 1}, {"-1": 1}, {"40": "1"}, [40]]
)
def test_bad_logit_bias(client: StrictClient, bias: Json) -> None:
    """Keys are token ids of the model, values from -100 to 100."""
    error = client.refused(TEXT, {"prompt": "x", "logit_bias": bias})
    assert error["param"].split(".")[0] == "logit_bias"


def test_allowed_token_ids(client: StrictClient) -> None:
    """Nothing else comes out."""
    tokens = _tokens(client, allowed_token_ids=[40, 41, 42], temperature=1, seed=1, max_tokens=24)
    assert set(tokens) <= {40, 41, 42}
    for ids in ([], [320], ["a"]):
        body = {"prompt": "x", "allowed_token_ids": ids}
        assert client.refused(TEXT, body)["param"].split(".")[0] == "allowed_token_ids"


def test_bad_words(client: StrictClient) -> None:
    """A banned word does not occur."""
    free = client.complete(PROMPT, max_tokens=24)["choices"][0]["text"]
    word = next(free[i] for i in range(len(free)) if free[i].isascii() and free[i].isalnum())
    text = client.complete(PROMPT, max_tokens=24, bad_words=[word])["choices"][0]["text"]
    assert text != free
    assert not text.startswith(free[: free.index(word) + 1])


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
def test_penalties(client: StrictClient, name: str) -> None:
    """What was said gets less likely, or with a negative one more likely."""
    fields = {"allowed_token_ids": list(range(40, 60)), "max_tokens": 60}
    free = _tokens(client, **fields)
    held = _tokens(client, **fields, **{name: 2.0})
    drawn = _tokens(client, **fields, **{name: -2.0})
    assert len(set(drawn)) <= len(set(free)) <= len(set(held))
    assert len({tuple(free), tuple(held), tuple(drawn)}) == 3


def test_repetition_penalty(client: StrictClient) -> None:
    """A strong one drives the answer away from what was said."""
    free = _tokens(client, max_tokens=60)
    held = _tokens(client, max_tokens=60, repetition_penalty=1.9)
    assert len(set(held)) > len(set(free))


def test_min_tokens(client: StrictClient, eos_token_id: int) -> None:
    """No end before so many tokens, however likely."""
    bias = {"logit_bias": {str(eos_token_id): 100}, "ignore_eos": False, "max_tokens": 9}
    assert _finish(client, **bias) == (1, "stop", None)
    assert _finish(client, **bias, min_tokens=5) == (6, "stop", None)
    error = client.refused(TEXT, {"prompt": "x", "max_tokens": 3, "min_tokens": 4})
    assert error["param"] in ("min_tokens", "max_tokens")


def test_ignore_eos(client: StrictClient, eos_token_id: int) -> None:
    """The end token is a token like any other."""
    bias = {"logit_bias": {str(eos_token_id): 100}}
    assert _finish(client, **bias, ignore_eos=True) == (4, "length", None)
    assert _finish(client, **bias, ignore_eos=False) == (1, "stop", None)


def test_stop_token_ids(client: StrictClient) -> None:
    """One of them ends the answer and is named; also with ignore_eos."""
    third = _tokens(client, max_tokens=12)[2]
    count, finish, stop = _finish(client, max_tokens=12, stop_token_ids=[third])
    assert (finish, stop) == ("stop", third)
    assert count <= 3


@pytest.mark.parametrize("number", [1, 4])
def test_stop_strings(client: StrictClient, number: int) -> None:
    """Up to four strings; whichever comes first ends the answer."""
    free = client.complete(PROMPT, max_tokens=30)["choices"][0]["text"]
    stop = next(free[i : i + 2] for i in range(6, 25) if "\ufffd" not in free[i : i + 2])
    stops = [stop, "\x01\x02", "never 1", "never 2"][:number]
    choice = client.complete(PROMPT, max_tokens=30, stop=stops)["choices"][0]
    assert choice["text"] == free[: free.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_seeds(client: StrictClient) -> None:
    """Every 64-bit number is a seed, and the same one gives the same tokens."""
    for seed in (0, -1, 2**63 - 1, -(2**63)):
        first, again = (_tokens(client, temperature=1, seed=seed) for _ in range(2))
        assert first == again
    assert client.refused(TEXT, {"prompt": "x", "seed": 2**64})["param"] == "seed"
