"""Offsets of tokens in the text that they make."""

from __future__ import annotations

import aiohttp
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai.logprobs import TextOffsets, spell
from tests.support.openai_calls import TEXT, post
from tests.support.scripted_engine import byte_tokenizer, scripted_gateway

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_ids[0]


@given(
    ids=st.lists(st.integers(0, TOKENIZER.vocab_size - 1) | st.just(END), max_size=40),
    start=st.integers(0, 5),
    skip=st.booleans(),
)
def test_offsets_point_at_the_tokens(ids: list[int], start: int, skip: bool) -> None:
    """Never descending, within the text, and at the token wherever it is a text of its own."""
    text = " " * start + TOKENIZER.decode(ids, skip)
    offsets = TextOffsets(TOKENIZER, start=start, skip_special_tokens=skip)
    found = [offsets.next(token_id) for token_id in ids]
    assert found == sorted(found)
    assert all(start <= offset <= len(text) for offset in found)
    for token_id, offset in zip(ids, found, strict=True):
        token = spell(TOKENIZER, token_id, whole=True)
        if not token.startswith("bytes:") and not (skip and TOKENIZER.is_special(token_id)):
            assert text[offset : offset + len(token)] == token


async def test_parts_of_characters_and_special_tokens() -> None:
    """Bytes of a character begin where it does; what the text leaves out takes no room."""
    async with scripted_gateway() as gateway, aiohttp.ClientSession() as session:
        gateway.engine.answer = "é<|im_end|>b"
        body = {"prompt": "<|im_end|>ñx", "echo": True, "logprobs": 0, "ignore_eos": True}
        for skip, text, offsets in (
            (True, "<|im_end|>ñxéb", [0, 10, 10, 11, 12, 12, 13, 13]),
            (False, "<|im_end|>ñxé<|im_end|>b", [0, 10, 10, 11, 12, 12, 13, 23]),
        ):
            wanted = {**body, "skip_special_tokens": skip}
            _, answer = await post(session, gateway, TEXT, wanted)
            (choice,) = answer["choices"]
            assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets)
