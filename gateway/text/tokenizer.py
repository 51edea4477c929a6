"""Text to token ids and back, from the `tokenizer.json` of a checkpoint.

Nothing here keeps state between calls, so any thread may use a `Tokenizer`. The two underlying
tokenizers share a vocabulary: one reads special tokens in text as such, the other spells them out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import decoders, pre_tokenizers

from expertmesh.errors import CheckpointError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Encodes and decodes with one checkpoint's vocabulary.

    Args:
        definition: Content of `tokenizer.json`.
        config: Content of `tokenizer_config.json`.

    Raises:
        ValueError: The definition cannot be used.
    """

    def __init__(self, definition: str, config: dict[str, Any] | None = None) -> None:
        self._config = config or {}
        self._inner = _load(definition)
        self._plain = _load(definition)
        self._plain.encode_special_tokens = True
        self._added = self._inner.get_added_tokens_decoder()
        self._special_texts = {token.content for token in self._added.values() if token.special}
        self._kinds = _decoder_kinds(self._inner.decoder)
        self._bytes: dict[int, bytes | None] = {}

    @classmethod
    def from_checkpoint(cls, model_dir: Path) -> Tokenizer | None:
        """The tokenizer of a model folder; None if the folder has none.

        What takes long for a large vocabulary is made here, and not by the first request.

        Raises:
            CheckpointError: `tokenizer.json` or `tokenizer_config.json` cannot be used.
        """
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            made = cls(path.read_text(encoding="utf-8"), read_config(model_dir))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"weights: {path}: {error}") from error
        _ = made.max_token_len, made._plain_continued
        return made

    @property
    def definition(self) -> str:
        """Content of `tokenizer.json`, as other libraries want it."""
        return self._inner.to_str()

    @property
    def config(self) -> Mapping[str, Any]:
        """Content of `tokenizer_config.json`; empty if there is none."""
        return self._config

    @cached_property
    def grammar_vocabulary(self) -> LLTokenizer:
        """The vocabulary for checking grammars; takes a moment when first asked for.

        Raises:
            ValueError: The library for grammars cannot use this tokenizer.
        """
        from llguidance import LLTokenizer  # not at the start of the command line

        return LLTokenizer(self.definition, eos_token=list(self.eos_ids) or None, slices=[])

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Id of `eos_token` in `tokenizer_config.json`; empty if it names none."""
        token_id = self._inner.token_to_id(self.special_token("eos_token"))
        return () if token_id is None else (token_id,)

    def special_token(self, role: str) -> str:
        """Text of a special token, e.g. of "bos_token"; empty if the checkpoint names none."""
        value = self._config.get(role)
        text = value.get("content") if isinstance(value, dict) else value
        return text if isinstance(text, str) else ""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens spelled in it count as such."""
        return _encode(self._inner, text, add_special_tokens)

    def encode_plain(self, text: str, *, first: bool = True) -> list[int]:
        """Token ids of a text in which special tokens are only letters.

        Args:
            text: What to encode.
            first: The text is not preceded by another one.
        """
        tokenizer = self._plain if first else self._plain_continued
        return _encode(tokenizer, text, False)

    @cached_property
    def _plain_continued(self) -> tokenizers.Tokenizer:
        """As `_plain`, but without the space that some tokenizers put before the first word."""
        pre_tokenizer = self._inner.pre_tokenizer
        if not (
            isinstance(pre_tokenizer, pre_tokenizers.Metaspace)
            and pre_tokenizer.prepend_scheme == "first"
        ):
            return self._plain
        copy = _load(self._inner.to_str())
        copy.encode_special_tokens = True
        copy.pre_tokenizer.prepend_scheme = "never"
        return copy

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; incomplete characters become U+FFFD."""
        return self._inner.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def max_token_len(self) -> int | None:
        """Most characters that one token can stand for; None if that cannot be known."""
        if self._inner.normalizer is not None:
            return None
        longest = max(map(len, self._inner.get_vocab(with_added_tokens=True)), default=1)
        absorbs = any(token.lstrip or token.rstrip for token in self._added.values())
        return None if absorbs else longest

    @cached_property
    def special_tokens(self) -> tuple[tokenizers.AddedToken, ...]:
        """Special tokens, longest first."""
        special = [token for token in self._added.values() if token.special]
        return tuple(sorted(special, key=lambda token: -len(token.content)))

    def token_id(self, token: str) -> int | None:
        """Id of a token by its exact spelling in the vocabulary."""
        return self._inner.token_to_id(token)

    def spelling(self, token_id: int) -> str:
        """Exact spelling of a token in the vocabulary; empty for an unknown id."""
        return self._inner.id_to_token(token_id) or ""

    def is_special(self, token_id: int) -> bool:
        """True for tokens that `decode` leaves out, unknown ids included."""
        token = self._inner.id_to_token(token_id)
        return token is None or token in self._special_texts

    def has_text(self, token_id: int, skip_special_tokens: bool) -> bool:
        """False for tokens that `decode` leaves out."""
        if skip_special_tokens:
            return not self.is_special(token_id)
        return self._inner.id_to_token(token_id) is not None

    @property
    def is_byte_level(self) -> bool:
        """True if the text of a sequence is the bytes of its tokens, one after the other."""
        return self._kinds == {"ByteLevel"}

    def is_byte_token(self, token_id: int) -> bool:
        """True for tokens like <0xE2>, whose text depends on their neighbours."""
        if "ByteFallback" not in self._kinds:
            return False
        return _BYTE_TOKEN.fullmatch(self._inner.id_to_token(token_id) or "") is not None

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes that a token stands for, possibly a part of a character.

        A special token stands for its spelling, an unknown id for nothing.
        """
        cached = self._bytes.get(token_id)
        if cached is None:
            cached = self._bytes[token_id] = self._find_bytes(token_id)
        return cached

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._inner.id_to_token(token_id)
        if token is None or token in self._special_texts:
            return (token or "").encode()
        if self.is_byte_level:
            return byte_level_bytes(token)
        if self.is_byte_token(token_id):
            return bytes([int(token[3:5], 16)])
        return self._text_after_another(token_id).encode()

    def _text_after_another(self, token_id: int) -> str:
        """Text of a token that is not the first one: decoders may strip a leading space there."""
        alone = self._inner.decode([token_id], skip_special_tokens=False)
        twice = self._inner.decode([token_id, token_id], skip_special_tokens=False)
        return twice[len(alone) :] if twice.startswith(alone) else alone

    def token_text(self, token_id: int) -> str:
        """Text of a single token; an incomplete character becomes U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")


def read_config(model_dir: Path) -> dict[str, Any]:
    """Content of `tokenizer_config.json`; empty if there is none.

    Raises:
        CheckpointError: The file is not a JSON object.
    """
    path = model_dir / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"weights: {path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"weights: {path}: expected a JSON object")
    return config


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a token in the alphabet of byte-level BPE.

    A token with a letter that is not in the alphabet was added as it is spelled.
    """
    try:
        return bytes(_BYTE_OF_LETTER[letter] for letter in token)
    except KeyError:
        return token.encode()


def _byte_of_letter() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for letters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_LETTER = _byte_of_letter()


def _load(definition: str) -> tokenizers.Tokenizer:
    """Parses a definition; the library raises bare exceptions for bad ones."""
    try:
        tokenizer = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:
        raise ValueError(f"not a usable tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _decoder_kinds(decoder: decoders.Decoder | None) -> set[str]:
    """Names of the decoder's parts."""
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    parts = state.get("decoders", [state])
    return {str(part["type"]) for part in parts}


def _encode(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Only batches release the interpreter lock, which a long text would hold for seconds."""
    batch = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = batch[0].ids
    return ids
