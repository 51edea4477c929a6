"""Two micro-batches in turn: the same bits, and only while it pays."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_worker.drafts import Speculation
from attention_worker.overlap import MIN_ROWS, SplitByTimes, StepTime, run_in_turn
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import ExpertUnavailableError
from expertmesh.v1 import attention_service_pb2 as pb
from tests.conftest import Models
from tests.support.expert_servers import faulty_server, loaded_store
from tests.support.expert_work import remote, right
from tests.support.flaky_experts import FlakyExperts
from tests.support.oracle import prompts
from tests.support.runner_driver import RunnerDriver, local_experts, make_runner
from tests.support.tiny_checkpoints import MIXTRAL


class Split:
    """Splits every step of two rows or more, or none; remembers times."""

    def __init__(self, *, always: bool) -> None:
        self.always = always
        self.times: list[StepTime] = []

    def should_split(self, num_rows: int) -> bool:
        """As told."""
        return self.always and num_rows > 1

    def see(self, time: StepTime) -> None:
        """Remembers."""
        self.times.append(time)


PROMPTS = prompts(MIXTRAL.vocab_size, (1, 5, 17, 30, 40, 9), seed=8)


@pytest.mark.parametrize("windows", [(), (7, None)], ids=["full", "windows"])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_bits_are_the_same(models: Models, windows: Sequence[int | None], num_drafts: int) -> None:
    """Decoding and prompt chunks mixed, sequences cut in the middle, drafts and preemption."""
    logits = []
    for always in (False, True):
        split = Split(always=always)
        runner = make_runner(
            models.tiny(MIXTRAL),
            splitter=split,
            sliding_windows=windows,
            speculation=Speculation(num_tokens=num_drafts),
        )
        driver = RunnerDriver(runner, chunk=13)
        requests = [driver.submit(prompt, 9) for prompt in PROMPTS]
        for _ in range(4):
            assert driver.step().status == pb.StepResponse.STATUS_DONE
        driver.preempt(driver.running[0])
        driver.run()
        assert {time.is_split for time in split.times if time.num_rows > 1} == {always}
        logits.append([np.stack(request.logits) for request in requests])
    for whole, split_logits in zip(*logits, strict=True):
        assert np.array_equal(whole, split_logits)


def test_each_micro_batch_has_its_messages(models: Models) -> None:
    """Two calls per layer where rows are split, and all rows once."""
    checkpoint = Checkpoint.open(models.tiny(MIXTRAL))
    with (
        faulty_server(loaded_store(checkpoint, "float32"), right, direct=True) as server,
        remote(checkpoint, [server.entry]) as there,
    ):
        runner = make_runner(checkpoint.model_dir, experts=there, splitter=Split(always=True))
        driver = RunnerDriver(runner)
        request = driver.submit(PROMPTS[2], 1)
        driver.run()
        alone = RunnerDriver(make_runner(checkpoint.model_dir))
        expected = alone.submit(PROMPTS[2], 1)
        alone.run()
    assert request.output == expected.output
    seen = [(m.id.layer, m.id.micro_batch, m.hidden_states.shape[0]) for m in server.requests]
    # Either half may be first with its next layer: each goes on as its own replies come.
    for half in range(2):
        assert [m for m in seen if m[1] == half] == [(layer, half, 9 - half) for layer in range(3)]


def test_requests_that_ask_for_experts_are_not_split(models: Models) -> None:
    """Who records routing wants whole layers."""
    split = Split(always=True)
    driver = RunnerDriver(make_runner(models.tiny(MIXTRAL), splitter=split))
    request = driver.submit(PROMPTS[2], 2, pb.SamplingSpec(return_routed_experts=True))
    driver.run()
    assert request.routed_experts
    assert not any(time.is_split for time in split.times)


def test_missing_experts_pause_a_split_step(models: Models) -> None:
    """As a whole one; the retry gives the same tokens."""
    checkpoint = Checkpoint.open(models.tiny(MIXTRAL))
    flaky = FlakyExperts(local_experts(checkpoint, "float32"))
    driver = RunnerDriver(
        make_runner(checkpoint.model_dir, experts=flaky, splitter=Split(always=True))
    )
    request = driver.submit(PROMPTS[3], 4)
    flaky.error = ExpertUnavailableError([(1, 5)])
    assert driver.step().status == pb.StepResponse.STATUS_PAUSED
    flaky.error = None
    driver.run()
    calm = RunnerDriver(make_runner(checkpoint.model_dir))
    expected = calm.submit(PROMPTS[3], 4)
    calm.run()
    assert request.output == expected.output


def test_passes_take_turns() -> None:
    """Each runs to its next pause; results are in order, whichever ends first."""
    seen: list[tuple[str, int]] = []

    def forward(name: str, num_layers: int) -> Generator[None, None, Tensor]:
        for layer in range(num_layers):
            seen.append((name, layer))
            yield
        return torch.tensor(num_layers)

    assert [int(x) for x in run_in_turn([forward("a", 3), forward("b", 1)])] == [3, 1]
    assert seen == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]


def test_a_pass_that_fails_ends_the_others() -> None:
    """Its error is raised, and the others do not go on."""
    ended: list[str] = []

    def forward(*, fails: bool) -> Generator[None, None, Tensor]:
        try:
            yield
            if fails:
                raise ExpertUnavailableError([(0, 1)])
            yield
        finally:
            ended.append("fails" if fails else "closed")
        return torch.zeros(1)

    with pytest.raises(ExpertUnavailableError):
        run_in_turn([forward(fails=False), forward(fails=True)])
    assert ended == ["fails", "closed"]


# --- the decision -----------------------------------------------------------------------------

Times = Callable[[float], float]


class Machine:
    """Steps whose times follow a law, with a little noise."""

    def __init__(self, own: Times, busy: Times, travel: float, *, contention: float = 1.0) -> None:
        self.splitter = SplitByTimes()
        self._own, self._busy, self._travel = own, busy, travel
        self._contention = contention  # of what happens at the same time
        self._rng = np.random.default_rng(0)

    def step(self, num_rows: int) -> bool:
        """Runs a step; True if it was split."""
        is_split = self.splitter.should_split(num_rows)
        whole_s, own_s, busy_s = self.times(num_rows, is_split=is_split)
        noise = 1 + 0.02 * self._rng.standard_normal()
        self.splitter.see(
            StepTime(num_rows, own_s * noise, (whole_s - own_s) * noise, busy_s * noise, is_split)
        )
        return is_split

    def times(self, num_rows: int, *, is_split: bool) -> tuple[float, float, float]:
        """Of a step: all, what the attention worker computes, what the expert worker does."""
        if not is_split:
            own_s, busy_s = self._own(num_rows), self._busy(num_rows)
            return own_s + busy_s + self._travel, own_s, busy_s
        half = num_rows / 2
        own_s, busy_s = self._contention * self._own(half), self._contention * self._busy(half)
        return max(2 * own_s, own_s + busy_s + self._travel, 2 * busy_s), 2 * own_s, 2 * busy_s

    def run(self, sizes: Sequence[int]) -> list[bool]:
        """Which of these steps were split."""
        return [self.step(size) for size in sizes]


SIZES = [1, 2, 4, 8, 12, 16, 20, 24, 28, *[32] * 400]


def linear(fixed: float, per_row: float) -> Times:
    return lambda num_rows: fixed + per_row * num_rows


def test_balanced_sides_are_split() -> None:
    """Where attention and experts take equally long, most large steps are; small ones never."""
    machine = Machine(linear(0.002, 0.001), linear(0.002, 0.001), travel=0.002)
    split = machine.run(SIZES)
    assert not any(split[:5])
    assert sum(split[50:]) > 0.9 * len(split[50:])
    assert not machine.splitter.should_split(MIN_ROWS - 1)


@pytest.mark.parametrize(
    ("own", "busy", "travel"),
    [
        (linear(0.03, 0.0), linear(0.03, 0.0), 0.001),
        (linear(0.002, 0.001), linear(0.0, 0.0), 0.0),
        (linear(0.03, 0.0001), linear(0.001, 0.0001), 0.001),
        (linear(0.001, 0.0001), linear(0.03, 0.0001), 0.001),
    ],
    ids=["fixed costs", "experts here", "little to hide", "busy experts"],
)
def test_others_are_never_split(own: Times, busy: Times, travel: float) -> None:
    """Costs that do not shrink with the rows, and nothing to hide."""
    assert not any(Machine(own, busy, travel).run(SIZES))


def test_sides_that_disturb_each_other_are_given_up() -> None:
    """Where both slow down when they run at once, a few steps show it, and then few are split."""
    machine = Machine(linear(0.002, 0.001), linear(0.002, 0.001), 0.002, contention=2.0)
    split = machine.run([*SIZES, *[32] * 2000])
    assert 0 < sum(split) < 0.02 * len(split)


def test_it_follows_a_change() -> None:
    """When experts become quick, splitting ends; when they are slow again, it comes back."""
    machine = Machine(linear(0.002, 0.001), linear(0.002, 0.001), 0.002)
    machine.run(SIZES)
    machine._busy, machine._travel = linear(0.0005, 0.00001), 0.0002
    assert not any(machine.run([32] * 400)[200:])
    machine._busy, machine._travel = linear(0.002, 0.001), 0.002
    assert sum(machine.run([32] * 1000)[500:]) > 400


def test_no_flapping() -> None:
    """Near the border the decision is kept for long."""
    machine = Machine(linear(0.004, 0.0004), linear(0.003, 0.0002), 0.0004)
    split = machine.run(SIZES)
    changes = sum(now != then for now, then in zip(split[50:], split[49:], strict=False))
    assert changes <= 8
