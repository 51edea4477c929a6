"""One leader at a time, tokens that only grow, and no clock of another machine believed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gateway.placement.lease_election import LeaseTimes
from gateway.placement.lease_record import LeaseRecord
from tests.support.endpoint_slices import until
from tests.support.kube.api_server import FakeApiServer
from tests.support.lease_mesh import KEY, LEASE, TIMES, Candidate, lease

PATIENT = LeaseTimes(duration_s=60.0, renew_s=40.0, retry_s=0.05)


class Elections:
    """Candidates, and what they were told in the order of time."""

    def __init__(self, server: FakeApiServer, folder: Path, stack: AsyncExitStack) -> None:
        self.server = server
        self.heard: list[tuple[str, int | None]] = []
        self._folder = folder
        self._stack = stack

    async def join(self, name: str, times: LeaseTimes = TIMES) -> Candidate:
        """One more."""
        made = await Candidate.create(name, self.server, self._folder, times)
        self._stack.push_async_callback(made.stop)
        made.start(self.heard)
        return made

    async def leader(self, name: str, times: LeaseTimes = TIMES) -> Candidate:
        """One more, which leads."""
        made = await self.join(name, times)
        await until(lambda: made.token is not None)
        return made

    async def until_looked_at(self, times: int = 1) -> None:
        """Until so many more requests for the Lease have come."""
        enough = self._num_requests() + times
        await until(lambda: self._num_requests() >= enough)

    def _num_requests(self) -> int:
        return sum(path.endswith(LEASE) for _, path in self.server.requests)


@pytest.fixture
async def elections(server: FakeApiServer, tmp_path: Path) -> AsyncIterator[Elections]:
    """All of them end."""
    async with AsyncExitStack() as stack:
        yield Elections(server, tmp_path, stack)


async def test_an_orderly_end_lets_another_lead_at_once(elections: Elections) -> None:
    """The Lease is given back after the end was told; tokens grow, also for the same gateway."""
    first = await elections.leader("a", PATIENT)
    second = await elections.join("b", PATIENT)
    await elections.until_looked_at(6)
    assert [name for name, _ in elections.heard] == ["a"]
    assert lease(elections.server)["leaseDurationSeconds"] == 60
    await first.stop()
    await until(lambda: second.token is not None)
    await second.stop()
    assert "holderIdentity" not in lease(elections.server)
    third = await elections.leader("a")
    tokens = [token for _, token in elections.heard if token is not None]
    assert [name for name, _ in elections.heard] == ["a", "a", "b", "b", "a"]
    assert tokens == sorted(set(tokens))
    assert third.token == tokens[-1]
    assert lease(elections.server)["leaseTransitions"] == 3


async def test_a_leader_that_is_cut_off_ends_before_another_begins(elections: Elections) -> None:
    """Each by its own clock; the one that was cut off takes part again when it can."""
    first = await elections.leader("a")
    second = await elections.join("b")
    first.api.is_cut = True
    await until(lambda: second.token is not None)
    assert [(name, token is None) for name, token in elections.heard] == [
        ("a", False),
        ("a", True),
        ("b", False),
    ]
    old = elections.heard[0][1]
    assert old is not None
    assert second.token is not None
    assert second.token > old
    first.api.is_cut = False
    await second.stop()
    await until(lambda: first.token is not None)
    assert first.token > second_token(elections)


def second_token(elections: Elections) -> int:
    """That of `b`."""
    return next(token for name, token in elections.heard if name == "b" and token is not None)


async def test_each_interruption_is_told(
    elections: Elections, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, however many renewals fail, and again when it comes again."""
    leader = await elections.leader("a", PATIENT)
    for _ in range(2):
        caplog.clear()
        leader.api.is_cut = True
        await until(lambda: bool(caplog.messages))
        leader.api.is_cut = False
        await elections.until_looked_at(5)  # the last one is sent after a success
        assert caplog.messages == [f"Lease {LEASE}: the network is cut"]
    assert elections.heard == [("a", leader.token)]


async def test_times_in_the_lease_are_not_believed(elections: Elections) -> None:
    """A holder whose clock is years behind is left alone while it renews; one whose clock is ahead
    is followed when it does not any more."""
    server = elections.server
    record = LeaseRecord("other", 7, 1, "2001-01-01T00:00:00.000000Z", acquired="2001")
    server.store.create(KEY.resource, record.to_lease(LEASE, KEY.namespace), KEY.namespace)
    candidate = await elections.join("a")
    for number in range(1, 6):
        await elections.until_looked_at()
        renew(server, f"2001-01-01T00:00:00.00000{number}Z")
    assert elections.heard == []
    renew(server, "2199-01-01T00:00:00.000000Z")
    await until(lambda: candidate.token is not None)
    assert lease(server)["leaseTransitions"] == 8


def renew(server: FakeApiServer, time: str) -> None:
    """As the holder of the Lease would."""
    server.store.update(KEY, lambda old: {**old, "spec": {**old["spec"], "renewTime": time}})


async def test_a_lease_that_is_deleted(elections: Elections) -> None:
    """Its holder stops at once; whoever makes it anew has a higher token, though it counts from 1
    again and is made in the same second."""
    first = await elections.leader("a")
    for _ in range(2):
        old = first.token
        assert old is not None
        num_heard = len(elections.heard)
        elections.server.store.delete(KEY)
        await until(lambda n=num_heard: len(elections.heard) == n + 2)
        assert elections.heard[-2] == ("a", None)
        assert first.token is not None
        assert first.token > old


async def test_a_lease_that_others_touch(elections: Elections) -> None:
    """An annotation makes the next renewal conflict; the holder leads on."""
    first = await elections.leader("a")
    server = elections.server

    def annotate(old: dict[str, object]) -> dict[str, object]:
        metadata = old["metadata"]
        assert isinstance(metadata, dict)
        return {**old, "metadata": {**metadata, "annotations": {"by": "somebody"}}}

    server.store.update(KEY, annotate)
    touched = int(server.store.get(KEY)["metadata"]["resourceVersion"])
    await until(lambda: int(server.store.get(KEY)["metadata"]["resourceVersion"]) > touched + 2)
    assert elections.heard == [("a", first.token)]


async def test_answers_that_are_lost(elections: Elections) -> None:
    """A Lease that was taken without hearing of it is taken again, as another term."""
    loser = await elections.join("a")
    loser.api.loses_answers = True
    await until(lambda: bool(elections.server.store.list(KEY.resource, KEY.namespace)))
    loser.api.loses_answers = False
    await until(lambda: loser.token is not None)
    assert loser.token is not None
    assert lease(elections.server)["leaseTransitions"] == 2


def test_tokens_of_a_lease_that_nobody_remembers() -> None:
    """A younger Lease has higher ones, however many terms the one before saw; within a Lease each
    term raises them, and what cannot be read counts as old."""

    def record(created: str, num_terms: int) -> LeaseRecord:
        metadata = {"creationTimestamp": created}
        return LeaseRecord.read({"metadata": metadata, "spec": {"leaseTransitions": num_terms}})

    old, new = record("2026-12-01T00:00:00Z", 5000), record("2026-12-01T00:00:01Z", 1)
    assert new.token > old.taken("a", 15.0).token > old.token
    assert new.above(old.token) == new
    assert old.above(new.token).token == new.token + 1
    assert new.token < 2**53  # so that JSON has it exactly
    assert record("", 3).token == record("yesterday", 3).token == 3
