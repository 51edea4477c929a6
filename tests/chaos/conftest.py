"""What scenarios share: meshes, what long requests are answered, and the table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.harness.mesh import Mesh, mesh_of_copies, networked_mesh
from tests.chaos.harness.streams import Workload
from tests.chaos.harness.suffering import Traffic
from tests.chaos.harness.table import Row, as_markdown
from tests.support.leaks import nothing_left_behind
from tests.support.tiny_checkpoints import MIXTRAL

_ROWS = pytest.StashKey[list[Row]]()


@pytest.fixture(scope="session")
def long_traffic(tiny_mixtral: Path) -> Traffic:
    """As `traffic`, of requests whose streams are open for long."""
    return Traffic.to(tiny_mixtral, Workload(MIXTRAL.vocab_size, min_tokens=300, max_tokens=400))


@pytest.fixture(autouse=True, scope="module")
def no_leaks() -> Iterator[None]:
    """Fails a module that leaves a process or a named thread behind.

    A single test may: expert workers that it has started again belong to the mesh of the module.
    """
    with nothing_left_behind():
        yield


@pytest.fixture(scope="module")
def mesh(tiny_mixtral: Path) -> Iterator[Mesh]:
    """Three expert workers with two copies of each expert, and their gateway."""
    with mesh_of_copies(tiny_mixtral) as running:
        yield running


@pytest.fixture(scope="module")
def networked(tiny_mixtral: Path) -> Iterator[Mesh]:
    """The same with a network in between."""
    with networked_mesh(tiny_mixtral) as running:
        yield running


@pytest.fixture
def table(request: pytest.FixtureRequest) -> list[Row]:
    """Takes rows of the table; they are printed at the end of the run."""
    return request.config.stash.setdefault(_ROWS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the table."""
    if rows := terminalreporter.config.stash.get(_ROWS, None):
        terminalreporter.section("faults")
        terminalreporter.write_line(as_markdown(rows))
