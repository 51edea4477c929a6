"""Calls that wait for the device: merged, oldest step first, each with its own fate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from expert_worker import backend as backend_module
from expert_worker.backend import ExpertBackend
from expert_worker.device_queue import DeviceQueue, Job, StepAges
from expert_worker.device_turn import DeviceTurn
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import ExpertUnavailableError
from expertmesh_kernels.cpu.words import HAS_FUTEX, get
from expertmesh_kernels.grouped_mlp import ExpertTable, grouped_mlp
from tests.conftest import Models
from tests.support.expert_servers import loaded_store
from tests.support.expert_work import TIMEOUT_S, Work, work
from tests.support.processes import poll
from tests.support.tiny_checkpoints import MIXTRAL

EXPERTS, OTHERS = ExpertTable({}), ExpertTable({})


class Device:
    """Computes x + 1 for each row once it may, and remembers what it was given together."""

    def __init__(self) -> None:
        self.batches: list[list[Job]] = []
        self.may_run = threading.Event()
        self.fails: Callable[[Sequence[Job]], bool] = lambda jobs: False

    def __call__(self, jobs: Sequence[Job]) -> list[Tensor]:
        self.batches.append(list(jobs))
        assert self.may_run.wait(TIMEOUT_S)
        if self.fails(jobs):
            raise ValueError("broken")
        return [job.x_RH + 1 for job in jobs]


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16, "test-call") as made:
        yield made


def test_a_call_whose_caller_is_gone_is_not_computed(
    device: Device, pool: ThreadPoolExecutor
) -> None:
    """It leaves the queue when its turn comes, and harms no other that it would have run with."""
    queue = DeviceQueue(device, 100)
    gone, waits = job(1), job(2)
    gone.is_wanted = lambda: False
    first, lost, second = start(queue, device, pool, [gone, waits])
    device.may_run.set()
    assert (first.result(TIMEOUT_S), second.result(TIMEOUT_S)) == (None, None)
    with pytest.raises(ConnectionError, match="whoever called is gone"):
        lost.result(TIMEOUT_S)
    assert [batch[1:] for batch in device.batches] == [[], []]
    assert device.batches[1] == [waits]


def job(
    value: int = 0,
    age_s: float = 0.0,
    experts: ExpertTable = EXPERTS,
    num_rows: int = 1,
    deadline_s: float | None = None,
) -> Job:
    rows = np.arange(num_rows)
    return Job(1, experts, torch.full((num_rows, 2), value), rows, rows, age_s, deadline_s)


def start(
    queue: DeviceQueue, device: Device, pool: ThreadPoolExecutor, jobs: Sequence[Job]
) -> list[Future[None]]:
    """Calls that all wait while the first one computes; in order."""
    first = pool.submit(queue.run, job())
    poll(lambda: len(device.batches) == 1, timeout_s=TIMEOUT_S, what="the device is busy")
    futures = [first]
    for number, one in enumerate(jobs):
        futures.append(pool.submit(queue.run, one))
        poll(
            lambda number=number: len(queue._waiting) > number,  # type: ignore[misc]
            timeout_s=TIMEOUT_S,
            what="a call waits",
        )
    return futures


def test_waiting_calls_for_the_same_experts_are_computed_together(
    device: Device, pool: ThreadPoolExecutor
) -> None:
    """Each gets its own outputs; those for other experts are computed apart; nobody waits on."""
    queue = DeviceQueue(device, 100)
    jobs = [job(1), job(2, experts=OTHERS), job(3), job(4, experts=OTHERS), job(5)]
    futures = start(queue, device, pool, jobs)
    device.may_run.set()
    for future in futures:
        future.result(TIMEOUT_S)
    assert [one.outputs_NH.tolist() for one in jobs if one.outputs_NH is not None] == [
        [[value + 1, value + 1]] for value in (1, 2, 3, 4, 5)
    ]
    assert device.batches[1:] == [[jobs[0], jobs[2], jobs[4]], [jobs[1], jobs[3]]]


def test_oldest_step_comes_first(device: Device, pool: ThreadPoolExecutor) -> None:
    """Whatever the order of arrival; equally old ones in that order."""
    queue = DeviceQueue(device, 100)
    tables = [ExpertTable({}) for _ in range(4)]
    jobs = [job(age_s=age, experts=table) for age, table in zip((3, 1, 2, 1), tables, strict=True)]
    futures = start(queue, device, pool, jobs)
    device.may_run.set()
    for future in futures:
        future.result(TIMEOUT_S)
    assert [batch[0] for batch in device.batches[1:]] == [jobs[1], jobs[3], jobs[2], jobs[0]]


def test_merged_rows_are_bounded(device: Device, pool: ThreadPoolExecutor) -> None:
    """A call that does not fit waits for the next turn, smaller ones behind it do not."""
    queue = DeviceQueue(device, 10)
    jobs = [job(num_rows=6), job(num_rows=5), job(num_rows=4), job(num_rows=50)]
    futures = start(queue, device, pool, jobs)
    device.may_run.set()
    for future in futures:
        future.result(TIMEOUT_S)
    assert device.batches[1:] == [[jobs[0], jobs[2]], [jobs[1]], [jobs[3]]]


def test_bad_call_harms_itself_only(device: Device, pool: ThreadPoolExecutor) -> None:
    """What fails together is computed one by one."""
    queue = DeviceQueue(device, 100)
    jobs = [job(1), job(2), job(3)]
    device.fails = lambda batch: jobs[1] in batch
    futures = start(queue, device, pool, jobs)
    device.may_run.set()
    with pytest.raises(ValueError, match="broken"):
        futures[2].result(TIMEOUT_S)
    for future in (futures[0], futures[1], futures[3]):
        future.result(TIMEOUT_S)
    assert jobs[0].outputs_NH is not None
    assert jobs[2].outputs_NH is not None


def test_deadline_of_each(device: Device, pool: ThreadPoolExecutor) -> None:
    """A call whose time is up ends at once and is not computed; the others are."""
    queue = DeviceQueue(device, 100)
    jobs = [job(1), job(2, deadline_s=time.monotonic() + 0.2), job(3, deadline_s=0.0)]
    futures = start(queue, device, pool, jobs[:2])
    with pytest.raises(TimeoutError, match=r"not free within 0\.0"):
        queue.run(jobs[2])
    with pytest.raises(TimeoutError, match="the device was not free within"):
        futures[2].result(TIMEOUT_S)
    device.may_run.set()
    futures[1].result(TIMEOUT_S)
    assert device.batches[1:] == [[jobs[0]]]


def test_call_that_is_late_finds_a_free_device(device: Device) -> None:
    """A deadline in the past is an error even if nobody is in the way."""
    device.may_run.set()
    with pytest.raises(TimeoutError):
        DeviceQueue(device, 100).run(job(deadline_s=time.monotonic() - 1))
    assert device.batches == []


@pytest.mark.skipif(not HAS_FUTEX, reason="turns need Linux")
def test_device_that_others_use(device: Device, pool: ThreadPoolExecutor) -> None:
    """A call waits for its turn until its time is up; those who wait meanwhile are merged."""
    turn = DeviceTurn()
    queue = DeviceQueue(device, 100, turn)
    device.may_run.set()
    assert turn.take(0)
    with pytest.raises(TimeoutError, match="the device was not free within"):
        queue.run(job(deadline_s=time.monotonic() + 0.03))
    jobs = [job(1), job(2), job(3, deadline_s=time.monotonic() + 0.05)]
    futures = [pool.submit(queue.run, one) for one in jobs]
    with pytest.raises(TimeoutError, match="the device was not free within"):
        futures[2].result(TIMEOUT_S)
    poll(lambda: len(queue._waiting) == 2, timeout_s=TIMEOUT_S, what="both wait")
    assert get(turn.wanted) == 2
    turn.give_back()
    for future in futures[:2]:
        future.result(TIMEOUT_S)
    assert [set(map(id, batch)) for batch in device.batches] == [{id(jobs[0]), id(jobs[1])}]
    assert turn.take(0), "it was given back"
    assert get(turn.wanted) == 0


def test_ages_of_steps() -> None:
    """A step is as old as its first call, for each gateway by itself; few gateways are kept."""
    ages = StepAges()
    assert ages.age_s(1, step=5, now_s=10.0) == 10.0
    assert ages.age_s(2, step=3, now_s=11.0) == 11.0
    assert ages.age_s(1, step=5, now_s=12.0) == 10.0
    assert ages.age_s(1, step=6, now_s=13.0) == 13.0
    assert ages.age_s(1, step=5, now_s=14.0) == 13.0  # it is over
    for gateway in range(1000):
        ages.age_s(gateway, step=1, now_s=20.0)
    assert len(ages._latest) <= 256


@pytest.fixture(scope="module")
def backend(models: Models) -> ExpertBackend:
    """All experts of a tiny Mixtral but the last."""
    checkpoint = Checkpoint.open(models.tiny(MIXTRAL))
    return ExpertBackend(loaded_store(checkpoint, "float32", "0-6"))


def _run(backend: ExpertBackend, todo: Work) -> Tensor:
    num_rows, top_k = todo.routing.topk_ids_TK.shape
    rows = np.repeat(np.arange(num_rows), top_k)
    experts = todo.routing.topk_ids_TK.reshape(-1).astype(np.int64)
    return backend.run(todo.layer, todo.h_TH, rows, experts).outputs_NH


def test_merged_calls_have_the_bits_of_single_ones(
    backend: ExpertBackend, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of several sizes and layers, some for an expert that is not there, all at once."""
    merged: list[int] = []
    may_run = threading.Event()

    def held(x_RH: Tensor, *args: object) -> Tensor:
        merged.append(len(x_RH))
        assert may_run.wait(TIMEOUT_S)
        return grouped_mlp(x_RH, *args)  # type: ignore[arg-type]

    def served(todo: Work) -> Work:
        ids = todo.routing.topk_ids_TK
        ids[ids == 7] = -1 % 7
        ids[:, 1] = np.where(ids[:, 0] == ids[:, 1], (ids[:, 1] + 1) % 7, ids[:, 1])
        return todo

    todo = [
        served(work(size, seed=seed, layer=1 + seed % 2))
        for seed, size in enumerate((1, 2, 5, 16, 3, 1, 7, 40))
    ]
    expected = [_run(backend, one) for one in todo]
    absent = work(4, seed=50)
    absent.routing.topk_ids_TK[:] = (7, 0)
    monkeypatch.setattr(backend_module, "grouped_mlp", held)
    first = pool.submit(_run, backend, todo[0])
    poll(lambda: len(merged) == 1, timeout_s=TIMEOUT_S, what="the device is busy")
    futures = [pool.submit(_run, backend, one) for one in todo]
    with pytest.raises(ExpertUnavailableError, match="expert 7"):
        _run(backend, absent)
    poll(
        lambda: len(backend._queue._waiting) == len(todo),
        timeout_s=TIMEOUT_S,
        what="all calls wait",
    )
    may_run.set()
    assert torch.equal(expected[0], first.result(TIMEOUT_S))
    for right, future in zip(expected, futures, strict=True):
        assert torch.equal(right, future.result(TIMEOUT_S))
    assert sorted(merged[1:]) == [1 + 5 + 3 + 7, 2 + 16 + 1 + 40]
