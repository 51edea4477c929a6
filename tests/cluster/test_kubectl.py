"""kubectl apply, scale, delete, rollout restart, a kill, an outage of the API: no request notices.

The manifests of `deploy/` run as processes of this machine, the API server is that of the tests,
kubectl is the real one. `make chaos` does it again and again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.harness.suffering import Traffic
from tests.cluster.changes import change_pods, under_load
from tests.cluster.deployed import Deployed, deployed, timed

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]

Times = dict[str, float]


@pytest.fixture(scope="module")
def mesh(tiny_mixtral: Path, times: Times) -> Iterator[Deployed]:
    """A gateway and two expert workers."""
    with timed(times, "all, until the cluster is gone"), deployed(tiny_mixtral, times) as running:
        yield running


def test_changes_under_load(mesh: Deployed, traffic: Traffic, times: Times) -> None:
    """0 failed requests, 0 changed answers, whatever is done to the expert workers."""
    with under_load(mesh, traffic, times) as load:
        change_pods(mesh, load, times)
