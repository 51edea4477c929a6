"""Everything under deploy/ is rendered once, when a test first asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.leaks import nothing_left_behind
from tests.support.manifests import VARIANTS, Manifests, parse, render_all


@pytest.fixture(scope="module", autouse=True)
def no_leaks() -> Iterator[None]:
    """Once a file: looking for processes takes longer than most of these tests."""
    with nothing_left_behind():
        yield


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
