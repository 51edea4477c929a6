"""Log probabilities in the formats of the OpenAI API, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from gateway.sequence import TokenLogprobs
from gateway.tokenizer import Tokenizer

Json = dict[str, object]

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def chat_logprobs(
    tokenizer: Tokenizer | None, tokens: Sequence[TokenLogprobs], *, as_ids: bool = False
) -> Json:
    """`logprobs` of a chat choice: a record per token, with its UTF-8 bytes.

    Args:
        tokenizer: For the spelling.
        tokens: Generated tokens.
        as_ids: Tokens are spelled "token_id:N".
    """
    speller = None if as_ids else tokenizer
    content = [
        {
            **_record(speller, tokenizer, token.token_id, token.logprob),
            "top_logprobs": [_record(speller, tokenizer, *candidate) for candidate in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _record(
    speller: Tokenizer | None, tokenizer: Tokenizer | None, token_id: int, logprob: float
) -> Json:
    return {
        "token": spell(speller, token_id, whole=False),
        "logprob": _finite(logprob),
        "bytes": None if tokenizer is None else list(tokenizer.token_bytes(token_id)),
    }


def completion_logprobs(
    tokenizer: Tokenizer | None,
    tokens: Sequence[TokenLogprobs],
    *,
    offset: int,
    prompt: Sequence[tuple[int, TokenLogprobs | None]] = (),
    as_ids: bool = False,
) -> tuple[Json, int]:
    """`logprobs` of a text choice: parallel arrays.

    Args:
        tokenizer: For the spelling.
        tokens: Generated tokens.
        offset: Characters before the first token.
        prompt: Tokens of the prompt that come before, if it is part of the text; the first one has
            no log probability.
        as_ids: Tokens are spelled "token_id:N".

    Returns:
        The object, and the characters after the last token.
    """
    speller = None if as_ids else tokenizer
    found = [*prompt, *((token.token_id, token) for token in tokens)]
    spelled = [spell(speller, token_id, whole=True) for token_id, _ in found]
    texts = [spell(tokenizer, token_id, whole=True) for token_id, _ in found]
    ends = list(accumulate(map(len, texts), initial=offset))
    logprobs: Json = {
        "tokens": spelled,
        "token_logprobs": [None if token is None else _finite(token.logprob) for _, token in found],
        "top_logprobs": [_top(speller, token) for _, token in found],
        "text_offset": ends[:-1],
    }
    return logprobs, ends[-1]


def _top(speller: Tokenizer | None, token: TokenLogprobs | None) -> Json | None:
    """The candidates, and the token itself where it is none of them."""
    if token is None:
        return None
    found = {**dict(token.top), token.token_id: token.logprob}
    return {
        spell(speller, token_id, whole=True): _finite(value) for token_id, value in found.items()
    }


def prompt_logprobs(
    tokenizer: Tokenizer | None, tokens: Sequence[TokenLogprobs | None]
) -> list[Json | None]:
    """`prompt_logprobs` as vLLM has them: for each token of the prompt an object from token ids to
    records, the prompt's own token first; null for the first token."""
    return [None if token is None else _records(tokenizer, token) for token in tokens]


def _records(tokenizer: Tokenizer | None, token: TokenLogprobs) -> Json:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(token.top, start=1)}
    candidates = {token.token_id: token.logprob, **dict(token.top)}
    return {
        str(token_id): {
            "logprob": _finite(logprob),
            "rank": ranks.get(token_id),
            "decoded_token": spell(tokenizer, token_id, whole=False),
        }
        for token_id, logprob in candidates.items()
    }


def spell(tokenizer: Tokenizer | None, token_id: int, *, whole: bool) -> str:
    """Text of a token.

    Args:
        tokenizer: None: the token is named by its id.
        token_id: The token.
        whole: Spell parts of characters byte by byte, so that different ones stay different.
    """
    if tokenizer is None:
        return f"token_id:{token_id}"
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        if whole:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return data.decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
