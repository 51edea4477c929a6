"""Compares what a model runner computes with transformers, and with itself bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attention_worker.model_runner import ModelRunner
from tests.support.oracle import MIN_MARGIN, Oracle
from tests.support.runner_driver import DrivenRequest, RunnerDriver

MAX_DIFFERENCE = 1e-4
"""Of any logit, in FP32."""
MIN_CLEAR = 0.95
"""Part of all steps in which the reference's choice is clear, so that tokens can be compared."""


@dataclass(frozen=True)
class Traffic:
    """How a driver cuts the work into steps."""

    chunk: int
    budget: int = 1024
    block_size: int = 16


@dataclass(frozen=True)
class Comparison:
    """Driven requests against the reference, teacher-forced."""

    max_difference: float
    """Of any logit."""
    num_equal: int
    """Clear steps with the reference's token."""
    num_clear: int
    """Steps in which the reference prefers its choice by a margin."""
    num_steps: int

    def check(self) -> None:
        """Fails unless logits are close, and tokens equal wherever the choice is clear."""
        assert self.max_difference <= MAX_DIFFERENCE
        assert self.num_equal == self.num_clear
        assert self.num_clear >= MIN_CLEAR * self.num_steps, "choose another seed"


def drive(
    runner: ModelRunner, traffic: Traffic, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[DrivenRequest]:
    """Greedy continuations of all prompts, which are submitted at once."""
    driver = RunnerDriver(runner, chunk=traffic.chunk, budget=traffic.budget)
    requests = [driver.submit(prompt, num_tokens) for prompt in prompts]
    driver.run()
    return requests


def compare(requests: Sequence[DrivenRequest], oracle: Oracle) -> Comparison:
    """All logits and tokens of these requests with the reference's for the same tokens."""
    expected_TV = np.concatenate([_expected(request, oracle) for request in requests])
    actual_TV = np.concatenate([np.stack(request.logits) for request in requests])
    token_ids_T = np.concatenate([request.output for request in requests])
    top_T2 = np.sort(expected_TV, axis=1)[:, -2:]
    clear_T = top_T2[:, 1] - top_T2[:, 0] > MIN_MARGIN
    equal_T = expected_TV.argmax(axis=1) == token_ids_T
    return Comparison(
        max_difference=float(np.abs(expected_TV - actual_TV).max()),
        num_equal=int((equal_T & clear_T).sum()),
        num_clear=int(clear_T.sum()),
        num_steps=len(token_ids_T),
    )


def _expected(request: DrivenRequest, oracle: Oracle) -> npt.NDArray[np.float32]:
    return oracle.logits(request.tokens)[len(request.prompt) - 1 : -1]


def bits(requests: Sequence[DrivenRequest]) -> list[bytes]:
    """All logits of each request."""
    return [np.stack(request.logits).tobytes() for request in requests]
