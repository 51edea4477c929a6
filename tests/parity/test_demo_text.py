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

import numpy as np
import pytest
from transformers import AutoTokenizer

from expertmesh.model_tools.demo import ensure_demo_model
from expertmesh.model_tools.progress import NoProgress
from expertmesh.settings import data_home
from tests.support.api import Api
from tests.support.mesh import serve
from tests.support.oracle import MIN_MARGIN, Oracle

NUM_TOKENS = 24
TOLERANCE = 1e-3
"""Of log probabilities: 30 layers, and the experts' halves are rounded separately."""

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


def _demo(variant: Literal["granular", "plain", "dense"]) -> Path:
    return ensure_demo_model(data_home(), variant, NoProgress())


@dataclass(frozen=True)
class Reference:
    """The dense model in transformers, in FP32."""

    oracle: Oracle
    prompts: tuple[tuple[int, ...], ...]


@pytest.fixture(scope="session")
def reference() -> Reference:
    """Loaded once."""
    dense = _demo("dense")
    tokenizer = AutoTokenizer.from_pretrained(dense)
    return Reference(Oracle(dense), tuple(tuple(tokenizer(text).input_ids) for text in PROMPTS))


MESHES: list[tuple[Variant, int]] = [("granular", 2)]
SLOW_MESHES: list[tuple[Variant, int]] = [
    ("granular", 0),
    ("granular", 1),
    ("granular", 3),
    ("plain", 0),
    ("plain", 1),
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
    for prompt, answer in zip(reference.prompts, answers, strict=True):
        expected = reference.oracle.follow(prompt, answer.token_ids)
        assert expected.margins.min() > MIN_MARGIN, "choose another prompt"
        assert expected.token_ids == answer.token_ids
        assert np.abs(expected.logprobs - np.array(answer.logprobs)).max() < TOLERANCE


def test_text_prompts_are_tokenized_alike(api: Api, reference: Reference) -> None:
    """A text prompt gives the tokens of the same prompt given as ids."""
    by_text = api.complete(PROMPTS[0], 4)
    assert api.complete(reference.prompts[0], 4) == by_text
