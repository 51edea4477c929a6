"""What tests on clusters share: pods are those of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.leaks import LeakGuard


@pytest.fixture(autouse=True, scope="module")
def no_leaks() -> Iterator[None]:
    """Fails a module that leaves a process or a named thread behind.

    A single test may: pods that it has had made are the cluster's.
    """
    guard = LeakGuard()
    yield
    leaks = guard.remaining(grace_s=5.0)
    assert leaks == [], f"left behind: {', '.join(leaks)}"
