"""What scenarios share: the model, what its requests are answered, and the table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.harness.mesh import Mesh, mesh_of_copies, networked_mesh
from tests.chaos.harness.streams import Workload
from tests.chaos.harness.suffering import Traffic
from tests.chaos.harness.table import Row, as_markdown
from tests.conftest import Models
from tests.support.leaks import LeakGuard
from tests.support.tiny_checkpoints import MIXTRAL

_ROWS = pytest.StashKey[list[Row]]()


@pytest.fixture(scope="session")
def chaos_model(models: Models) -> Path:
    """A tiny Mixtral of 8 experts."""
    return models.tiny(MIXTRAL)


@pytest.fixture(scope="session")
def traffic(chaos_model: Path) -> Traffic:
    """Requests to it, and what each is answered by one process in which nothing fails, alone."""
    return Traffic.to(chaos_model, Workload(MIXTRAL.vocab_size))


@pytest.fixture(scope="session")
def long_traffic(chaos_model: Path) -> Traffic:
    """The same of requests whose streams are open for long."""
    return Traffic.to(chaos_model, Workload(MIXTRAL.vocab_size, min_tokens=300, max_tokens=400))


@pytest.fixture(autouse=True, scope="module")
def no_leaks() -> Iterator[None]:
    """Fails a module that leaves a process or a named thread behind.

    A single test may: expert workers that it has started again belong to the mesh of the module.
    """
    guard = LeakGuard()
    yield
    leaks = guard.remaining(grace_s=5.0)
    assert leaks == [], f"left behind: {', '.join(leaks)}"


@pytest.fixture(scope="module")
def mesh(chaos_model: Path) -> Iterator[Mesh]:
    """Three expert workers with two copies of each expert, and their gateway."""
    with mesh_of_copies(chaos_model) as running:
        yield running


@pytest.fixture(scope="module")
def networked(chaos_model: Path) -> Iterator[Mesh]:
    """The same with a network in between."""
    with networked_mesh(chaos_model) as running:
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
