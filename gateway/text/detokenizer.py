"""Token ids to text while they are generated: whole characters only, cut at stop strings.

A `Detokenizer` belongs to one request and is used by one thread. The sum of what it returns is the
decoded text of all tokens, so streaming and not streaming give the same answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from gateway.text.tokenizer import Tokenizer

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class TextUpdate:
    """Text that a token made certain, and the stop string that ended the output, if one did."""

    text: str
    stop_reason: str | None = None


class Detokenizer:
    """Text of one request.

    Args:
        tokenizer: None for a checkpoint without one: the text stays empty.
        stop: Strings that end the output.
        include_stop: The stop string is part of the text.
        skip_special_tokens: Special tokens are not part of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: tuple[str, ...] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._decoder = _make_decoder(tokenizer, skip_special_tokens)
        self._stop = StopStrings(stop, include=include_stop)

    def push(self, token_id: int) -> TextUpdate:
        """Adds a token. After a stop string everything is ignored."""
        return self._stop.push(self._decoder.push(token_id))

    def push_unchecked(self, token_id: int) -> TextUpdate:
        """Adds a token whose text cannot be a part of a stop string."""
        return TextUpdate(self._decoder.push(token_id))

    def flush(self) -> str:
        """The rest of the text, at the end of the output; incomplete characters become U+FFFD."""
        update = self._stop.push(self._decoder.flush())
        return update.text + self._stop.flush()


class StopStrings:
    """Finds the stop string that is complete first, however the text is cut into pieces.

    Text that may turn out to be the beginning of a stop string is held back. If several stop
    strings are complete at the same character, the longest counts.

    Args:
        stop: The stop strings.
        include: The text ends behind the stop string, not before it.
    """

    def __init__(self, stop: Iterable[str], *, include: bool = False) -> None:
        self._include = include
        self._matchers = [_Matcher(text) for text in stop]
        self._held = ""
        self._ended = False

    def push(self, text: str) -> TextUpdate:
        """Adds text; returns what is certainly not part of a stop string."""
        if self._ended:
            return TextUpdate("")
        pending = self._held + text
        for index, letter in enumerate(text, start=len(self._held) + 1):
            found = [matcher.text for matcher in self._matchers if matcher.push(letter)]
            if found:
                return self._end(pending[:index], max(found, key=len))
        num_held = max((matcher.num_matched for matcher in self._matchers), default=0)
        certain_len = len(pending) - num_held
        self._held = pending[certain_len:]
        return TextUpdate(pending[:certain_len])

    def _end(self, text: str, stop: str) -> TextUpdate:
        self._ended = True
        self._held = ""
        return TextUpdate(text if self._include else text[: len(text) - len(stop)], stop)

    def flush(self) -> str:
        """What was held back; the output has ended."""
        held, self._held, self._ended = self._held, "", True
        return held


class _Matcher:
    """Follows one stop string letter by letter (Knuth, Morris, Pratt), so that no text, however
    repetitive, costs more than a constant per letter."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        """Length of the longest prefix of the stop string that the text ends with."""
        self._fallback = _fallback_lens(text)

    def push(self, letter: str) -> bool:
        """Adds a letter; True if the stop string is complete."""
        while self.num_matched and letter != self.text[self.num_matched]:
            self.num_matched = self._fallback[self.num_matched - 1]
        if letter == self.text[self.num_matched]:
            self.num_matched += 1
        return self.num_matched == len(self.text)


def _fallback_lens(text: str) -> list[int]:
    """For each prefix of `text`: length of its longest proper prefix that is also its suffix."""
    lens = [0] * len(text)
    matched = 0
    for index in range(1, len(text)):
        while matched and text[index] != text[matched]:
            matched = lens[matched - 1]
        if text[index] == text[matched]:
            matched += 1
        lens[index] = matched
    return lens


class _Decoder(Protocol):
    """Turns tokens into text that later tokens cannot change."""

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that became certain."""

    def flush(self) -> str:
        """The rest."""


class _NoText:
    """Without a tokenizer there is no text."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class _ByteDecoder:
    """Byte-level vocabularies: the text is the bytes of the tokens, in constant time per token."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if not self._tokenizer.has_text(token_id, self._skip):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Other vocabularies: decodes a short window again with each token.

    ids:  [ ...returned long ago... | returned last | not returned yet ]
                                     0         _num_returned         end    of _window

    The part that was returned last gives the context: decoders treat the first token in a special
    way. Tokens like <0xE2> are held until another one ends their run, since a single invalid byte
    makes the whole run invalid.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._num_returned = 0
        self._returned = ""
        """Text of window[:_num_returned]."""

    def push(self, token_id: int) -> str:
        if not self._tokenizer.has_text(token_id, self._skip):
            return ""
        self._window.append(token_id)
        if self._tokenizer.is_byte_token(token_id):
            return ""
        text = self._tokenizer.decode(self._window, self._skip)
        if text.endswith(_UNKNOWN) or len(text) <= len(self._returned):
            return ""
        return self._advance(text)

    def _advance(self, text: str) -> str:
        """Returns the new part of the window's text and moves the window on."""
        new_text = text[len(self._returned) :]
        self._window = self._window[self._num_returned :]
        self._num_returned = len(self._window)
        self._returned = self._tokenizer.decode(self._window, self._skip)
        return new_text

    def flush(self) -> str:
        new_text = self._tokenizer.decode(self._window, self._skip)[len(self._returned) :]
        self._window, self._num_returned, self._returned = [], 0, ""
        return new_text


def _make_decoder(tokenizer: Tokenizer | None, skip_special_tokens: bool) -> _Decoder:
    if tokenizer is None:
        return _NoText()
    kind = _ByteDecoder if tokenizer.is_byte_level else _WindowDecoder
    return kind(tokenizer, skip_special_tokens)
