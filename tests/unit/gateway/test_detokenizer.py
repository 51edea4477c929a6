"""The detokenizer against the tokenizer's own decoding of the whole output."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from gateway.text.detokenizer import Detokenizer, StopStrings
from gateway.text.tokenizer import Tokenizer

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def byte_level() -> Tokenizer:
    """All bytes, some merges that cut characters, a special token and an added one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ã", "©"), ("ð", "Ł"), ("Ġ", "a"), ("a", "b")]
    tokens = alphabet + [left + right for left, right in merges]
    vocab = {token: index for index, token in enumerate(tokens)}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|im_end|>"])
    raw.add_tokens([AddedToken("hé llo", normalized=False)])
    return Tokenizer(raw.to_str())


def byte_fallback() -> Tokenizer:
    """SentencePiece style: spaces as U+2581, bytes as <0xNN>, the first space stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁Hello", "▁world", "llo", "a", "é", "▁▁", UNKNOWN]
    raw = RawTokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(raw.to_str())


def metaspace() -> Tokenizer:
    """Pieces joined by the Metaspace decoder."""
    pieces = ["<unk>", "▁", "▁Hello", "▁world", "llo", "a", "é"]
    raw = RawTokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="<unk>"))
    raw.decoder = decoders.Metaspace()
    return Tokenizer(raw.to_str())


TOKENIZERS = {
    "byte_level": byte_level(),
    "byte_fallback": byte_fallback(),
    "metaspace": metaspace(),
}


def stream(tokenizer: Tokenizer | None, ids: list[int], *, skip: bool = True) -> list[str]:
    """Everything that a detokenizer returns, in order."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(token_id).text for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_pieces_add_up_to_the_decoded_text(name: str, data: st.DataObject) -> None:
    """Whatever the tokens, the pieces joined are what decoding all tokens at once gives."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    skip = data.draw(st.booleans(), label="skip_special_tokens")
    assert tokenizer.decode(ids, skip) == "".join(stream(tokenizer, ids, skip=skip))


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@given(text=st.text(alphabet=st.characters(codec="utf-8", exclude_characters="▁ "), max_size=20))
def test_valid_text_never_shows_half_characters(name: str, text: str) -> None:
    """Bytes of valid text, one token each: every piece consists of whole characters."""
    tokenizer = TOKENIZERS[name]
    if name == "byte_level":
        ids = tokenizer.encode_plain(text)
    else:
        ids = [3 + byte for byte in text.encode()]
    pieces = stream(tokenizer, ids)
    assert text == "".join(pieces)
    assert all(UNKNOWN not in piece for piece in pieces) or UNKNOWN in text


def test_a_character_comes_with_its_last_byte() -> None:
    """An emoji of four byte-level tokens appears at once, with the fourth token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(raw.to_str())
    ids = tokenizer.encode("😀")
    assert len(ids) == 4
    assert stream(tokenizer, ids) == ["", "", "", "😀", ""]


def test_special_tokens_have_no_text() -> None:
    """The end token adds nothing, and does not disturb a space that follows it."""
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = [tokenizer.token_id(piece) for piece in ("<s>", "▁Hello", "</s>", "▁world")]
    assert None not in ids
    assert stream(tokenizer, [i for i in ids if i is not None]) == ["", "Hello", "", " world", ""]


def test_without_a_tokenizer_there_is_no_text() -> None:
    """A checkpoint without a tokenizer gives empty text and never a stop reason."""
    detokenizer = Detokenizer(None, ("a",))
    assert (detokenizer.push(7).text, detokenizer.push(8).stop_reason) == ("", None)
    assert detokenizer.flush() == ""


def stop_oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first; the longest of equals."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    pieces=st.lists(st.text(alphabet="ab ", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="ab ", min_size=1, max_size=5), max_size=4),
)
def test_stop_strings_are_found_across_pieces(pieces: list[str], stops: list[str]) -> None:
    """The text is cut at the first complete stop string, wherever the pieces are cut."""
    finder = StopStrings(stops)
    found = push_all(finder, pieces)
    text, reason = stop_oracle("".join(pieces), stops)
    assert found == (text, reason)
    assert push_all(StopStrings(stops, include=True), pieces) == (text + (reason or ""), reason)


def push_all(finder: StopStrings, pieces: list[str]) -> tuple[str, str | None]:
    """The whole text, and the stop string that ended it."""
    text, reason = "", None
    for piece in pieces:
        update = finder.push(piece)
        text += update.text
        reason = reason or update.stop_reason
    return text + finder.flush(), reason


@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=3), max_size=10),
    stop=st.text(alphabet="ab", min_size=1, max_size=4),
)
def test_only_a_possible_beginning_is_held_back(pieces: list[str], stop: str) -> None:
    """Text that cannot be part of a stop string any more is returned at once."""
    finder = StopStrings([stop])
    seen, returned = "", ""
    for piece in pieces:
        seen += piece
        update = finder.push(piece)
        returned += update.text
        if update.stop_reason:
            return
        held = next(n for n in range(len(stop), -1, -1) if seen.endswith(stop[:n]) or n == 0)
        assert seen[: len(seen) - held] == returned


def test_a_repetitive_stop_string_is_cheap() -> None:
    """A stop string of equal letters does not cost a comparison per letter and position."""
    finder = StopStrings(["a" * 1023 + "b"])
    text = finder.push("a" * 200_000).text + finder.flush()
    assert len(text) == 200_000


def test_nothing_follows_a_stop_string() -> None:
    """Tokens pushed after the stop string add nothing, and nor does the flush."""
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer, ("STOP",))
    updates = [detokenizer.push(i) for i in tokenizer.encode("go STOP and more")]
    assert "".join(update.text for update in updates) == "go "
    assert [update.stop_reason for update in updates if update.stop_reason] == ["STOP"]
    assert detokenizer.flush() == ""


def test_token_bytes_spell_single_tokens() -> None:
    """Bytes of a token may be a part of a character; special tokens are spelled."""
    tokenizer = TOKENIZERS["byte_level"]
    first, *_ = tokenizer.encode("ñ")
    assert (tokenizer.token_bytes(first), tokenizer.token_text(first)) == (b"\xc3", UNKNOWN)
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    assert tokenizer.token_text(end) == "<|im_end|>"
    assert tokenizer.token_bytes(10_000) == b""
    fallback = TOKENIZERS["byte_fallback"]
    assert [
        fallback.token_bytes(token_id)
        for token in ("<0xE2>", "▁Hello")
        if (token_id := fallback.token_id(token)) is not None
    ] == [b"\xe2", b" Hello"]


def test_definitions_name_their_decoder() -> None:
    """Only a plain byte-level decoder is decoded byte by byte."""
    assert TOKENIZERS["byte_level"].is_byte_level
    assert not TOKENIZERS["byte_fallback"].is_byte_level
    definition = json.loads(RawTokenizer(models.BPE()).to_str())
    assert not Tokenizer(json.dumps(definition)).is_byte_level
