"""Discovery over EndpointSlices finds the truth again after every fault, and keeps what it knows.

How soon is counted in rounds, not by the clock: a round is a LIST and a watch of a second at most.
Whatever a watch missed is there with the next LIST, so within two watches.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from tests.support.endpoint_slices import TIMES, Followed, following, pod, until
from tests.support.kube.api_server import FakeApiServer


async def test_changes_are_told_at_once(server: FakeApiServer, tmp_path: Path) -> None:
    """Each by the watch that is open, without another LIST; what stays the same is not told."""
    async with following(server, tmp_path, replace(TIMES, watch_s=60)) as followed:
        slices = followed.slices
        slices.put("a", pod(1, node="n1"))
        await followed.until_hosts("1")
        assert followed.heard[-1][0].node == "n1"
        slices.put("a", pod(1, node="n1"), pod(2, "down"))
        slices.put("b", pod(3))
        await followed.until_hosts("1", "3")
        slices.put("a", pod(1, "draining"))
        await followed.until_hosts("1-", "3")
        slices.delete("b")
        await followed.until_hosts("1-")
        assert len(followed.lists) == 1
        report = followed.discovery.report()
        assert (report.num_up, report.num_leaving, report.num_down) == (0, 1, 0)
        assert report.problem == ""
        assert report.age_s is not None
        assert len(followed.heard) == len(set(followed.heard))


async def converges(followed: Followed, *hosts: str) -> None:
    """The view is this before a third LIST from now on is begun."""
    num_lists = len(followed.lists)
    await followed.until_hosts(*hosts)
    assert len(followed.lists) <= num_lists + 2


async def test_a_missed_delete(server: FakeApiServer, tmp_path: Path) -> None:
    """The next LIST tells."""
    async with following(server, tmp_path) as followed:
        followed.slices.put("a", pod(1))
        followed.slices.put("b", pod(2))
        await followed.until_hosts("1", "2")
        await followed.until_watched()
        with server.missed_events():
            followed.slices.delete("b")
        await converges(followed, "1")


async def test_a_version_that_is_forgotten(server: FakeApiServer, tmp_path: Path) -> None:
    """410 in the watch: LIST, and a watch from what that says."""
    async with following(server, tmp_path) as followed:
        followed.slices.put("a", pod(1))
        await followed.until_hosts("1")
        await followed.until_watched()
        with server.missed_events():
            followed.slices.put("a", pod(1), pod(2))
        server.gone()
        server.drop_watches()
        await converges(followed, "1", "2")


def answer(status: int, message: str, **headers: str) -> web.Response:
    """A Status object."""
    text = json.dumps({"kind": "Status", "code": status, "message": message})
    return web.Response(status=status, text=text, content_type="application/json", headers=headers)


class Refuse:
    """A fault: some requests for slices are answered with an error, then no more.

    Args:
        watches: Watches are, not LISTs.
        response: The answer.
        times: How often.
    """

    def __init__(self, response: web.Response, *, watches: bool, times: int = 1) -> None:
        self._response = response
        self._watches = watches
        self.left = times
        self.refused_s: list[float] = []
        self.passed_s: list[float] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse | None:
        """Answers, or leaves it to the server."""
        if ("watch" in request.query) is not self._watches:
            return None
        if not self.left:
            self.passed_s.append(time.monotonic())
            return None
        self.left -= 1
        self.refused_s.append(time.monotonic())
        return answer(self._response.status, "Too large resource version", **self._response.headers)


async def test_a_version_from_the_future(server: FakeApiServer, tmp_path: Path) -> None:
    """504 for the watch: the next one has the version of another LIST, which names none."""
    async with following(server, tmp_path) as followed:
        followed.slices.put("a", pod(1))
        await followed.until_hosts("1")
        refuse = Refuse(web.Response(status=504), watches=True, times=3)
        server.faults.append(refuse)
        server.drop_watches()
        await until(lambda: refuse.left == 0)
        followed.slices.put("a", pod(2))
        await converges(followed, "2")
        await until(lambda: bool(refuse.passed_s))
        assert all("resourceVersion" not in query for query in followed.lists)
        assert int(followed.watches[-1]["resourceVersion"]) <= server.store.version
        assert followed.discovery.report().num_errors >= 3


async def test_too_many_requests(server: FakeApiServer, tmp_path: Path) -> None:
    """429: nothing is asked for as long as Retry-After says, and the view stays."""
    async with following(server, tmp_path) as followed:
        followed.slices.put("a", pod(1))
        await followed.until_hosts("1")
        refuse = Refuse(web.Response(status=429, headers={"Retry-After": "1"}), watches=False)
        server.faults.append(refuse)
        server.drop_watches()
        await until(lambda: refuse.left == 0)
        followed.slices.put("a", pod(2))
        await converges(followed, "2")
        assert refuse.passed_s[0] - refuse.refused_s[0] >= 1.0


async def test_a_half_open_watch(server: FakeApiServer, tmp_path: Path) -> None:
    """A connection on which nothing comes any more is given up, and the view is right again."""
    hung: list[web.Request] = []

    async def hang(request: web.Request) -> web.StreamResponse | None:
        if "watch" not in request.query or hung:
            return None
        hung.append(request)
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(60)
        return response

    async with following(server, tmp_path, replace(TIMES, slack_s=0.2)) as followed:
        followed.slices.put("a", pod(1))
        await followed.until_hosts("1")
        server.faults.append(hang)
        server.drop_watches()
        await until(lambda: bool(hung))
        followed.slices.put("a", pod(1), pod(2))
        await converges(followed, "1", "2")
        assert followed.discovery.report().num_errors >= 1


async def test_a_slow_list(server: FakeApiServer, tmp_path: Path) -> None:
    """Is given up after its time, the view stays meanwhile, and the next one counts."""
    stalled: list[web.Request] = []

    async def stall(request: web.Request) -> web.StreamResponse | None:
        if "watch" not in request.query and not stalled:
            stalled.append(request)
            await asyncio.sleep(60)
        return None

    async with following(server, tmp_path, replace(TIMES, list_s=0.5)) as followed:
        followed.slices.put("a", pod(1))
        await followed.until_hosts("1")
        num_errors = followed.discovery.report().num_errors
        server.faults.append(stall)
        server.drop_watches()
        await until(lambda: bool(stalled))
        followed.slices.put("a", pod(2))
        assert followed.hosts == ["1"]
        await until(lambda: followed.discovery.report().num_errors > num_errors)
        await converges(followed, "2")


async def test_the_api_server_is_away(server: FakeApiServer, tmp_path: Path) -> None:
    """For as long as many tries take, the last view stays; then the truth is there."""
    async with following(server, tmp_path) as followed:
        followed.slices.put("a", pod(1), pod(2, "draining"))
        await followed.until_hosts("1", "2-")
        heard, before = list(followed.heard), followed.discovery.report().num_errors
        with server.outage():
            followed.slices.put("a", pod(1))
            await until(lambda: followed.discovery.report().num_errors >= before + 20)
            assert followed.heard == heard
            report = followed.discovery.report()
            assert (report.num_up, report.num_leaving) == (1, 1)
            assert "the API server" in report.problem
        await converges(followed, "1")
        assert followed.discovery.report().problem == ""


async def test_an_evicted_pod(server: FakeApiServer, tmp_path: Path) -> None:
    """It has no address: it is left out, and harms nobody."""
    async with following(server, tmp_path) as followed:
        followed.slices.put("a", pod(1), pod(2))
        await followed.until_hosts("1", "2")
        followed.slices.put("a", pod(1), pod(2, "evicted"))
        await followed.until_hosts("1")


async def test_a_pod_moves_between_slices(server: FakeApiServer, tmp_path: Path) -> None:
    """While it is in both, it is told once; when one of them goes, it stays."""
    async with following(server, tmp_path) as followed:
        followed.slices.put("a", pod(1), pod(2))
        await followed.until_hosts("1", "2")
        num_heard = len(followed.heard)
        followed.slices.put("b", pod(2), pod(3))
        await followed.until_hosts("1", "2", "3")
        followed.slices.put("a", pod(1))
        followed.slices.delete("a")
        await followed.until_hosts("2", "3")
        assert num_heard < len(followed.heard) <= num_heard + 3


async def test_what_is_no_json(server: FakeApiServer, tmp_path: Path) -> None:
    """A proxy's page in place of events or of a list counts as a failure like any other."""
    left = [True, True]

    async def garble(request: web.Request) -> web.StreamResponse | None:
        is_watch = "watch" in request.query
        if left[is_watch]:
            left[is_watch] = False
            return web.Response(text="<html>\n")
        return None

    server.faults.append(garble)
    async with following(server, tmp_path) as followed:
        followed.slices.put("a", pod(1))
        await followed.until_hosts("1")
        await until(lambda: not any(left) and followed.discovery.report().num_errors >= 2)
        await converges(followed, "1")


async def test_a_service_that_is_not_there(
    server: FakeApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No endpoints are told, with the reason; it is logged once, not each round."""
    async with following(server, tmp_path) as followed:
        await followed.until_watched()
        server.drop_watches()
        await followed.until_watched(2)
        assert followed.heard == [()]
        problem = followed.discovery.report().problem
        assert problem.startswith(
            "Service mesh/expert-worker: it has no EndpointSlices: is it there"
        )
        assert [record.getMessage() for record in caplog.records].count(problem) == 1


async def test_a_gateway_that_may_not(server: FakeApiServer, tmp_path: Path) -> None:
    """The server's own words say what is missing."""
    words = 'endpointslices is forbidden: User "gateway" cannot list resource'

    async def forbid(request: web.Request) -> web.StreamResponse | None:
        return answer(403, words)

    server.faults.append(forbid)
    async with following(server, tmp_path) as followed:
        await until(lambda: followed.discovery.report().num_errors > 0)
        assert followed.discovery.report().problem.endswith(
            f": the API server answers 403: {words}"
        )
        assert followed.discovery.report().age_s is None
        assert followed.heard == []


async def test_the_end_is_soon(server: FakeApiServer, tmp_path: Path) -> None:
    """A watch that is open does not hold it up, and nothing is told afterwards."""
    async with following(server, tmp_path) as followed:
        followed.slices.put("a", pod(1))
        await followed.until_hosts("1")
        await asyncio.to_thread(followed.discovery.stop)
        num_heard, num_lists = len(followed.heard), len(followed.lists)
        followed.slices.put("a", pod(2))
        await asyncio.to_thread(followed.discovery.stop)
        assert (len(followed.heard), len(followed.lists)) == (num_heard, num_lists)
