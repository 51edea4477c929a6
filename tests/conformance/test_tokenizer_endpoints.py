"""/tokenize, /detokenize and /tokenizer_info, by which tools do without a local tokenizer."""

from __future__ import annotations

import pytest

from tests.support.strict_client import CONTEXT_LEN, HELLO, StrictClient

TEXT = "The quick brown fox, naïve café 日本語 🙂"


def test_round_trip(client: StrictClient) -> None:
    """Ids of a text, and the text of the ids."""
    answer = client.ok("/tokenize", {"prompt": TEXT})
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == CONTEXT_LEN
    assert client.ok("/detokenize", {"tokens": answer["tokens"]}) == {"prompt": TEXT}


def test_ids_are_those_of_prompts(client: StrictClient) -> None:
    """The same ids that a completion of the text sees."""
    tokens = client.ok("/tokenize", {"prompt": TEXT, "add_special_tokens": True})["tokens"]
    answer = client.complete(TEXT, return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == tokens


def test_conversation(client: StrictClient) -> None:
    """The ids that a chat sees, with and without the head of the answer."""
    tokens = client.ok("/tokenize", {"messages": HELLO})["tokens"]
    assert client.chat(return_token_ids=True)["prompt_token_ids"] == tokens
    closed = client.ok("/tokenize", {"messages": HELLO, "add_generation_prompt": False})
    assert closed["tokens"] == tokens[: closed["count"]]
    assert closed["count"] < len(tokens)


def test_spelling(client: StrictClient) -> None:
    """The tokens' texts, if asked for."""
    answer = client.ok("/tokenize", {"prompt": "The quick", "return_token_strs": True})
    assert len(answer["token_strs"]) == answer["count"]
    assert not client.ok("/tokenize", {"prompt": "The quick"}).get("token_strs")


def test_empty(client: StrictClient) -> None:
    """No ids are no text."""
    assert client.ok("/detokenize", {"tokens": []}) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [320]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
def test_refused(client: StrictClient, path: str, body: object, param: str) -> None:
    """Bad input is named."""
    assert client.refused(path, body)["param"].split(".")[0] == param


def test_info(client: StrictClient) -> None:
    """The tokenizer's configuration with the chat template, as lm-eval reads it."""
    answer = client.api.get("/tokenizer_info")
    assert answer.status == 200
    assert answer.json["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert answer.json["eos_token"] == "<|im_end|>"
    assert "im_start" in answer.json["chat_template"]
