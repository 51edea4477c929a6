"""Copies of an expert whose bytes differ: who is set aside, who is wrong, and what is said."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from expertmesh.model_config import ModelConfig
from gateway.mesh.arbiter import Answer
from gateway.mesh.copy_judge import MANY, CopyJudge
from gateway.mesh.mesh_status import ExpertWorkerState
from gateway.mesh.worker_report import ServedIdentity, WorkerReport, read_snapshot
from gateway.placement.state import ExpertKey
from tests.support.small_config import model
from tests.support.watch_server import snapshot

MODEL = bytes(range(32))
SERVED = ServedIdentity("tiny", MODEL, "float32")
KEY, OTHER = (1, 2), (1, 0)
RIGHT, WRONG, THIRD = 11, 12, 13


@dataclass
class Court:
    """A judge, what it has asked, and what workers say."""

    config: ModelConfig
    asked: list[ExpertKey] = field(default_factory=list)
    reports: dict[str, WorkerReport] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.judge = CopyJudge(self.asked.append)

    def told(
        self, worker_id: str, copies: Mapping[ExpertKey, int], *, incarnation: int = 1
    ) -> None:
        """A worker holds these from now on, and nobody has looked yet."""
        resident: dict[int, list[int]] = {}
        for layer, expert in sorted(copies):
            resident.setdefault(layer, []).append(expert)
        state = snapshot(
            *(worker_id, MODEL, resident),
            incarnation=incarnation,
            bytes_of=lambda layer, expert: copies[layer, expert],
        )
        self.reports[worker_id] = read_snapshot(state, worker_id, SERVED, self.config)

    def say(self, worker_id: str, copies: Mapping[ExpertKey, int], *, incarnation: int = 1) -> None:
        """A worker holds these from now on."""
        self.told(worker_id, copies, incarnation=incarnation)
        self.look()

    def leave(self, worker_id: str) -> None:
        """A worker is not heard of any more."""
        del self.reports[worker_id]
        self.look()

    def look(self) -> None:
        """The judge hears of all."""
        known = [report.known for report in self.reports.values() if report.known is not None]
        self.judge.hear({(w.view.worker_id, w.view.incarnation): w.copies for w in known})

    def used(self, worker_id: str) -> set[ExpertKey]:
        """What the expert map would have of a worker."""
        entry = self.judge.judged(self.reports[worker_id]).entry
        resident = {} if entry is None else entry.resident
        return {(layer, expert) for layer, experts in resident.items() for expert in experts}


@pytest.fixture
def court() -> Court:
    """Of a model with layers of many experts."""
    return Court(model(num_experts=MANY))


def test_equal_copies_are_not_looked_at(court: Court) -> None:
    """Nobody reads anything, and reports stay as they are."""
    for name in ("w0", "w1"):
        court.say(name, {KEY: RIGHT, OTHER: THIRD})
    assert court.asked == []
    assert court.judge.judged(court.reports["w1"]) is court.reports["w1"]


def test_a_newcomer_that_differs_waits_for_the_verdict(
    court: Court, caplog: pytest.LogCaptureFixture
) -> None:
    """Who is used stays so meanwhile; the question is asked once; one line says what to do."""
    court.say("w0", {KEY: RIGHT, OTHER: RIGHT})
    court.say("w1", {KEY: WRONG, OTHER: RIGHT})
    court.say("w2", {KEY: WRONG})
    assert court.asked == [KEY]
    assert [court.used(name) for name in ("w0", "w1", "w2")] == [{KEY, OTHER}, {OTHER}, set()]
    with caplog.at_level(logging.ERROR):
        court.judge.take(Answer(KEY, RIGHT))
    assert [court.used(name) for name in ("w0", "w1", "w2")] == [{KEY, OTHER}, {OTHER}, set()]
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == court.judge.num_wrong == 2
    assert "expert worker w1 has layer 1 expert 2 with other bytes" in lines[0]
    assert "Copy the checkpoint to its machine again and restart it" in lines[0]


def test_the_first_one_may_be_wrong(court: Court) -> None:
    """Then it is who is left out, and the newcomer is used."""
    court.say("w0", {KEY: WRONG})
    court.say("w1", {KEY: RIGHT})
    court.judge.take(Answer(KEY, RIGHT))
    assert (court.used("w0"), court.used("w1")) == (set(), {KEY})
    court.say("w2", {KEY: WRONG})
    assert court.used("w2") == set()
    assert court.asked == [KEY], "what is known is not read again"


def test_nobody_is_trusted_where_all_are_new(court: Court) -> None:
    """Copies that differ when they are seen first are all set aside until one is right."""
    court.told("w0", {KEY: WRONG})
    court.say("w1", {KEY: RIGHT})
    assert (court.used("w0"), court.used("w1")) == (set(), set())
    court.judge.take(Answer(KEY, RIGHT))
    assert (court.used("w0"), court.used("w1")) == (set(), {KEY})


def test_a_worker_that_comes_back_with_other_bytes(court: Court) -> None:
    """What its earlier life had counts, though nobody else holds the expert."""
    court.say("w0", {KEY: RIGHT})
    court.leave("w0")
    court.say("w0", {KEY: WRONG}, incarnation=2)
    assert (court.used("w0"), court.asked) == (set(), [KEY])
    court.judge.take(Answer(KEY, RIGHT))
    assert court.used("w0") == set()
    court.say("w0", {KEY: RIGHT}, incarnation=3)
    assert court.used("w0") == {KEY}
    view = court.judge.judged(court.reports["w0"]).known
    assert view is not None
    assert view.view.wrong == frozenset(), "the next life was given the right files"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(KEY, THIRD), "the checkpoint of this gateway is like none of them"),
        (Answer(KEY, None, "truncated"), "cannot be read: truncated"),
    ],
    ids=["odd", "unreadable"],
)
def test_an_own_checkpoint_that_tells_nothing_changes_nothing(
    court: Court, caplog: pytest.LogCaptureFixture, answer: Answer, said: str
) -> None:
    """All copies are used; the line names the expert and who has what."""
    court.say("w0", {KEY: RIGHT})
    court.say("w1", {KEY: WRONG})
    with caplog.at_level(logging.ERROR):
        court.judge.take(answer)
    assert (court.used("w0"), court.used("w1")) == ({KEY}, {KEY})
    (line,) = [record.getMessage() for record in caplog.records]
    assert "copies of layer 1 expert 2 differ" in line
    assert f"w1 has {WRONG:016x}" in line
    assert said in line
    assert court.judge.num_wrong == 0
    court.say("w2", {KEY: WRONG})
    assert (court.used("w2"), court.asked) == ({KEY}, [KEY])


def test_placement_does_not_count_a_wrong_copy(court: Court) -> None:
    """It is in memory, to be unloaded, and not to be loaded there again, also once it is gone."""
    court.say("w0", {KEY: RIGHT})
    court.say("w1", {KEY: WRONG, OTHER: RIGHT})
    court.judge.take(Answer(KEY, RIGHT))
    for retiring in (frozenset({KEY}), frozenset[ExpertKey]()):
        known = court.judge.judged(court.reports["w1"]).known
        assert known is not None
        assert known.view.resident == {OTHER}
        assert (known.view.wrong, known.view.failed) == ({KEY}, {KEY})
        assert known.view.retiring == retiring
        court.say("w1", {OTHER: RIGHT})
    status = court.judge.judged(court.reports["w1"]).status
    assert status.state is ExpertWorkerState.READY
    assert "layer 1 expert 2 with other bytes than this gateway's checkpoint" in status.message


def test_a_worker_of_which_all_is_wrong_is_not_used(court: Court) -> None:
    """Not for its first few experts, as it may be loading; with a right one the rest serves on."""
    keys = [(1, expert) for expert in range(MANY)]
    court.say("w0", dict.fromkeys(keys, RIGHT) | {(2, 0): RIGHT})
    for count in (1, MANY):
        court.say("w1", dict.fromkeys(keys[:count], WRONG))
        for key in keys[:count]:
            court.judge.take(Answer(key, RIGHT))
        judged = court.judge.judged(court.reports["w1"])
        assert (judged.known is None) == (count == MANY)
    assert judged.status.state is ExpertWorkerState.INCOMPATIBLE
    assert f"layer 1 expert 0 and {MANY - 1} more" in judged.status.message
    court.say("w1", dict.fromkeys(keys, WRONG) | {(2, 0): RIGHT})
    assert court.used("w1") == {(2, 0)}


def test_workers_that_tell_no_fingerprints_are_used(court: Court) -> None:
    """As before there were any."""
    court.say("w0", {KEY: RIGHT})
    court.reports["w1"] = read_snapshot(snapshot("w1", MODEL, {1: [2]}), "w1", SERVED, court.config)
    court.look()
    assert (court.used("w1"), court.asked) == ({KEY}, [])
