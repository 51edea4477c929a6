"""Everything under deploy/ is rendered once, when a test first asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.leaks import LeakGuard
from tests.support.manifests import VARIANTS, Manifests, parse, render_all


@pytest.fixture(scope="module", autouse=True)
def no_leaks() -> Iterator[None]:
    """Once a file: looking for processes takes longer than most of these tests."""
    guard = LeakGuard()
    yield
    leaks = guard.remaining(grace_s=5.0)
    assert leaks == [], f"left behind: {', '.join(leaks)}"


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What kubectl prints, by variant."""
    return dict(render_all(tmp_path_factory.mktemp("kustomize"), VARIANTS))


@pytest.fixture(scope="session")
def rendered(texts: dict[str, bytes]) -> dict[str, Manifests]:
    """The objects of each variant."""
    return {name: Manifests(name, parse(text)) for name, text in texts.items()}


@pytest.fixture(params=VARIANTS)
def found(request: pytest.FixtureRequest, rendered: dict[str, Manifests]) -> Manifests:
    """Each variant in turn; not to be changed."""
    return rendered[request.param]
