"""Work that takes long is done where it does not keep the event loop from others."""

from __future__ import annotations

import threading
import time
from typing import Any

import aiohttp
import pytest

from gateway.openai.completion_answer import CompletionAnswer
from tests.support.openai_calls import TEXT, post
from tests.support.scripted_engine import byte_tokenizer, scripted_gateway

TOKENIZER = byte_tokenizer()


def test_a_long_text_does_not_hold_the_interpreter_lock() -> None:
    """Another thread goes on while a text is encoded."""
    gaps: list[float] = []
    done = threading.Event()

    def tick() -> None:
        last_s = time.perf_counter()
        while not done.wait(0.001):
            now_s = time.perf_counter()
            gaps.append(now_s - last_s)
            last_s = now_s

    thread = threading.Thread(target=tick)
    thread.start()
    started_s = time.perf_counter()
    ids = TOKENIZER.encode("ab" * 400_000)
    took_s = time.perf_counter() - started_s
    done.set()
    thread.join()
    assert len(ids) == 800_000
    assert took_s > 0.05, "too short to show anything"
    assert len(gaps) > 5
    assert max(gaps) < 0.8 * took_s


@pytest.mark.parametrize(("length", "in_thread"), [(10, False), (400, True)])
async def test_large_answers_are_made_outside_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, length: int, in_thread: bool
) -> None:
    """Log probabilities of a long prompt are many objects; small answers are not worth a thread."""
    names: list[str] = []
    whole = CompletionAnswer.whole

    def watched(answer: CompletionAnswer, *args: Any) -> object:
        names.append(threading.current_thread().name)
        return whole(answer, *args)

    monkeypatch.setattr(CompletionAnswer, "whole", watched)
    body = {"prompt": [65] * length, "prompt_logprobs": 3, "max_tokens": 1}
    async with scripted_gateway() as gateway, aiohttp.ClientSession() as session:
        status, answer = await post(session, gateway, TEXT, body)
    assert status == 200
    assert len(answer["choices"][0]["prompt_logprobs"]) == length
    assert [name.startswith("tokenize") for name in names] == [in_thread]
