"""The real demo models through the mesh say what the dense model says in transformers.

The granular model adds up to the dense one only if the right pair of experts is chosen, computed
and combined for every token; the plain one shows lost rows and wrong weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from tests.support.api import Api
from tests.support.mesh import serve

NUM_TOKENS = 24

QUESTION = "What is the capital of France?"

PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a",
    "The three primary colors are",
    "Water boils at a temperature of",
    "def fibonacci(n):",
    "The largest planet in the solar system is",
    "In the year 1969, the first man",
    "A recipe for bread needs flour,",
    "Dear Sir or Madam, I am writing to",
    "The opposite of hot is",
)

Variant = Literal["granular", "plain"]


@dataclass(frozen=True)
class Reference:
    """Prompts as token ids, and the dense model's greedy continuations."""

    prompts: tuple[tuple[int, ...], ...]
    expected: tuple[tuple[int, ...], ...]
    margins: tuple[tuple[float, ...], ...]


class _Quiet:
    """Progress that nobody watches."""

    def stage(self, name: str, total: int | None = None) -> None:
        """A new stage."""

    def advance(self, amount: int = 1) -> None:
        """Some progress."""

    def done(self) -> None:
        """The end."""


def _demo(variant: Literal["granular", "plain", "dense"]) -> Path:
    from expertmesh.model_tools.demo import ensure_demo_model
    from expertmesh.settings import data_home

    return ensure_demo_model(data_home(), variant, _Quiet())


@pytest.fixture(scope="session")
def reference() -> Reference:
    """What transformers' dense model says, in FP32."""
    from transformers import AutoTokenizer

    from tests.support.oracle import Oracle

    dense = _demo("dense")
    tokenizer = AutoTokenizer.from_pretrained(dense)
    oracle = Oracle(dense)
    prompts = tuple(tuple(tokenizer(prompt).input_ids) for prompt in PROMPTS)
    answers = [oracle.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    return Reference(
        prompts,
        tuple(answer.token_ids for answer in answers),
        tuple(tuple(answer.margins.tolist()) for answer in answers),
    )


MESHES: list[tuple[Variant, int]] = [
    ("granular", 2),
    ("granular", 0),
    ("plain", 1),
]
SLOW_MESHES: list[tuple[Variant, int]] = [
    ("granular", 1),
    ("granular", 3),
    ("plain", 0),
    ("plain", 2),
    ("plain", 3),
]


def _name(mesh: tuple[Variant, int]) -> str:
    return f"{mesh[0]}-{mesh[1] or 'colocated'}"


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(mesh, id=_name(mesh)) for mesh in MESHES),
        *(pytest.param(mesh, id=_name(mesh), marks=pytest.mark.slow) for mesh in SLOW_MESHES),
    ],
)
def api(request: pytest.FixtureRequest) -> Iterator[Api]:
    """A demo model served in FP32 with this number of expert workers."""
    variant, expert_workers = request.param
    with serve(_demo(variant), expert_workers=expert_workers) as server:
        yield server.api


def test_capital_of_france(api: Api) -> None:
    """The chat question about the capital of France is answered with Paris."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 16}
    answer = api.post("/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    choice = answer.json["choices"][0]
    assert choice["message"]["content"] == "The capital of France is Paris."
    assert choice["finish_reason"] == "stop"


def test_greedy_tokens_of_ten_prompts(api: Api, reference: Reference) -> None:
    """Ten prompts at once continue, token by token, as the dense model does in transformers."""
    with ThreadPoolExecutor(len(PROMPTS), thread_name_prefix="client") as pool:
        answers = list(pool.map(lambda prompt: api.complete(prompt, NUM_TOKENS), reference.prompts))
    assert list(reference.expected) == [answer.token_ids for answer in answers]


def test_text_prompts_are_tokenized_alike(api: Api, reference: Reference) -> None:
    """A text prompt gives the tokens of the same prompt given as ids."""
    answer = api.complete(PROMPTS[0], 4)
    assert reference.expected[0][:4] == answer.token_ids
