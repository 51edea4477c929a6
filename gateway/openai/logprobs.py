"""Log probabilities in the two formats of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.sequence import TokenLogprobs
from gateway.tokenizer import Tokenizer

Json = dict[str, object]

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def chat_logprobs(tokenizer: Tokenizer | None, tokens: Sequence[TokenLogprobs]) -> Json:
    """`logprobs` of a chat choice: a record per token, with its UTF-8 bytes."""
    content = [
        {
            **_record(tokenizer, token.token_id, token.logprob),
            "top_logprobs": [_record(tokenizer, *candidate) for candidate in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _record(tokenizer: Tokenizer | None, token_id: int, logprob: float) -> Json:
    return {
        "token": _spell(tokenizer, token_id, whole=False),
        "logprob": _finite(logprob),
        "bytes": None if tokenizer is None else list(tokenizer.token_bytes(token_id)),
    }


def completion_logprobs(
    tokenizer: Tokenizer | None, tokens: Sequence[TokenLogprobs], *, num_top: int, offset: int
) -> tuple[Json, int]:
    """`logprobs` of a text choice: parallel arrays.

    Args:
        tokenizer: For the spelling.
        tokens: Generated tokens.
        num_top: Candidates asked for; 0 gives null in their place.
        offset: Characters before the first token.

    Returns:
        The object, and the characters after the last token.
    """
    spelled = [_spell(tokenizer, token.token_id, whole=True) for token in tokens]
    offsets = []
    for text in spelled:
        offsets.append(offset)
        offset += len(text)
    top: list[Json] = [
        {_spell(tokenizer, token_id, whole=True): _finite(value) for token_id, value in token.top}
        for token in tokens
    ]
    logprobs: Json = {
        "tokens": spelled,
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": top if num_top else None,
        "text_offset": offsets,
    }
    return logprobs, offset


def _spell(tokenizer: Tokenizer | None, token_id: int, *, whole: bool) -> str:
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
