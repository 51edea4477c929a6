"""Log probabilities in the formats of the OpenAI API, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.sequence import TokenLogprobs
from gateway.text.detokenizer import Detokenizer
from gateway.text.tokenizer import Tokenizer

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


class TextOffsets:
    """Where the tokens of one text begin in it.

    A token that is only a part of a character begins where the character does, as far as that is
    known; one that adds nothing to the text, where the next one does.

    Args:
        tokenizer: None: the text is empty.
        start: Characters before the first token.
        skip_special_tokens: Special tokens are not part of the text.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, *, start: int = 0, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._end = start

    def next(self, token_id: int) -> int:
        """Offset of the next token."""
        before = self._end
        self._end += len(self._detokenizer.push(token_id).text)
        own = 0 if self._tokenizer is None else len(self._tokenizer.token_text(token_id))
        return max(before, self._end - own)


def completion_logprobs(
    tokenizer: Tokenizer | None,
    tokens: Sequence[tuple[int, TokenLogprobs | None]],
    offsets: Sequence[int],
    *,
    as_ids: bool = False,
) -> Json:
    """`logprobs` of a text choice: parallel arrays.

    Args:
        tokenizer: For the spelling.
        tokens: Tokens of the text; the first one of a prompt has no log probability.
        offsets: Where they begin in the text.
        as_ids: Tokens are spelled "token_id:N".
    """
    speller = None if as_ids else tokenizer
    return {
        "tokens": [spell(speller, token_id, whole=True) for token_id, _ in tokens],
        "token_logprobs": [
            None if found is None else _finite(found.logprob) for _, found in tokens
        ],
        "top_logprobs": [_top(speller, found) for _, found in tokens],
        "text_offset": list(offsets),
    }


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
