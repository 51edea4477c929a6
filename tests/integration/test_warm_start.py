"""Compiled kernels are kept: a start with a warm cache compiles nothing, nor does a request."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.api import Api
from tests.support.mesh import serve
from tests.support.random_requests import random_request

FLAGS = ("--num-speculative-tokens", "3", "--max-model-len", "512")
COMPILED, LOADED = "[cache] data saved to", "[cache] data loaded from"
"""What Numba says when it has compiled a kernel, and when it has found one."""


def _ask_everything(api: Api) -> None:
    """Every parameter; prompts and batches of several sizes."""
    for length in (1, 5, 40, 400):
        api.complete([7] * length, 3)
    bodies = [random_request(number) for number in range(24)]
    for width in (1, 6):
        with ThreadPoolExecutor(width) as pool:
            answers = list(pool.map(lambda body: api.post("/v1/completions", body), bodies))
        assert [answer.status for answer in answers] == [200] * len(bodies)


@pytest.mark.parametrize("expert_workers", [0, 1])
def test_nothing_is_compiled_twice_or_late(text_model: Path, expert_workers: int) -> None:
    """Once there was a start, the next one compiles nothing; a request never does, nor does it
    look for kernels."""
    for _ in range(2):
        with serve(
            text_model,
            *FLAGS,
            expert_workers=expert_workers,
            dtype="bfloat16",
            env={"NUMBA_DEBUG_CACHE": "1"},
        ) as server:
            at_start = server.process.stderr
            _ask_everything(server.api)
            later = server.process.stderr[len(at_start) :]
        assert LOADED in at_start or COMPILED in at_start, "the test shows nothing"
        late = [line for line in later.splitlines() if COMPILED in line or LOADED in line]
        assert late == []
        if COMPILED not in at_start:
            return
    raise AssertionError("the second start compiled what the first had compiled")
