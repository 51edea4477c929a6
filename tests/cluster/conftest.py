"""What tests on clusters share: servers, and a table of times."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.cluster.servers import Server, fake_server, real_server
from tests.support.kube.control_plane import ControlPlane, binaries, control_plane
from tests.support.leaks import nothing_left_behind

Times = dict[str, float]
_TIMES = pytest.StashKey[Times]()


@pytest.fixture(autouse=True, scope="module")
def no_leaks() -> Iterator[None]:
    """Fails a module that leaves a process or a named thread behind.

    A single test may: pods that it has had made are the cluster's.
    """
    with nothing_left_behind():
        yield


@pytest.fixture(scope="module")
def real_plane() -> Iterator[ControlPlane]:
    """A real control plane; only where there are binaries of one."""
    paths = binaries()
    if paths is None:
        pytest.skip("no binaries of a control plane are named")
    with control_plane(paths) as plane:
        yield plane


@pytest.fixture(params=["fake", "real"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    """Each server in turn, without objects of earlier tests."""
    is_fake = request.param == "fake"
    made = fake_server() if is_fake else real_server(request.getfixturevalue("real_plane"))
    async with made as running:
        yield running


@pytest.fixture(scope="session")
def times(request: pytest.FixtureRequest) -> Times:
    """Takes what was done and the seconds that it took; printed at the end of the run."""
    return request.config.stash.setdefault(_TIMES, {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the times."""
    if times := terminalreporter.config.stash.get(_TIMES, None):
        terminalreporter.section("pocket cluster")
        for what, time_s in times.items():
            terminalreporter.write_line(f"{what:<48} {time_s:6.1f} s")
