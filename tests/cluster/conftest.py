"""What tests on clusters share: answers to compare with, and a table of times."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.chaos.harness.streams import Workload, answers_alone
from tests.chaos.harness.suffering import Traffic
from tests.cluster.servers import Server, fake_server, real_server
from tests.conftest import Models
from tests.support.kube.control_plane import ControlPlane, binaries, control_plane
from tests.support.leaks import LeakGuard
from tests.support.mesh import gateway
from tests.support.tiny_checkpoints import MIXTRAL

Times = dict[str, float]
_TIMES = pytest.StashKey[Times]()


@pytest.fixture(autouse=True, scope="module")
def no_leaks() -> Iterator[None]:
    """Fails a module that leaves a process or a named thread behind.

    A single test may: pods that it has had made are the cluster's.
    """
    guard = LeakGuard()
    yield
    leaks = guard.remaining(grace_s=5.0)
    assert leaks == [], f"left behind: {', '.join(leaks)}"


@pytest.fixture(scope="module")
def real_plane() -> Iterator[ControlPlane]:
    """A real control plane; only where there are binaries of one."""
    paths = binaries()
    assert paths is not None
    with control_plane(paths) as plane:
        yield plane


_NEEDS_BINARIES = pytest.mark.skipif(
    binaries() is None, reason="no binaries of a control plane are named"
)


@pytest.fixture(params=["fake", pytest.param("real", marks=_NEEDS_BINARIES)])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    """Each server in turn, without objects of earlier tests."""
    is_fake = request.param == "fake"
    made = fake_server() if is_fake else real_server(request.getfixturevalue("real_plane"))
    async with made as running:
        yield running


@pytest.fixture(scope="session")
def cluster_model(models: Models) -> Path:
    """A tiny Mixtral of 8 experts."""
    return models.tiny(MIXTRAL)


@pytest.fixture(scope="session")
def traffic(cluster_model: Path) -> Traffic:
    """Requests to it, and what each is answered alone by the colocated mode."""
    workload = Workload(MIXTRAL.vocab_size)
    with gateway(cluster_model, ["local"]) as server:
        return Traffic(workload, answers_alone(server.api.port, workload))


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
