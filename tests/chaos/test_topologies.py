"""Gateways and expert workers in other numbers than one and two, and gateways that die."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.chaos.harness.checks import changed, failed, wait_idle
from tests.chaos.harness.load import Load
from tests.chaos.harness.mesh import doomed_gateway, kill_tree
from tests.chaos.harness.pool import expert_pool, shares_with_copies
from tests.chaos.harness.suffering import NUM_STREAMS, RUNNING_TOKENS, Traffic, judge
from tests.chaos.harness.table import Row
from tests.support.mesh import gateway
from tests.support.processes import poll
from tests.support.tiny_checkpoints import MIXTRAL

pytestmark = [pytest.mark.alone, pytest.mark.chaos]

FLOAT32 = ("--dtype", "float32")
_EVEN_SHARES = {
    1: ("all",),
    3: tuple(shares_with_copies(MIXTRAL.num_experts, 3, 1)),
}


@pytest.mark.parametrize(
    ("num_gateways", "shares"),
    [
        pytest.param(1, _EVEN_SHARES[1], id="1:1"),
        pytest.param(1, _EVEN_SHARES[3], id="1:3"),
        pytest.param(2, _EVEN_SHARES[1], id="2:1"),
        pytest.param(2, _EVEN_SHARES[3], id="2:3"),
        pytest.param(1, ("all", "none"), id="all rows to one"),
        pytest.param(2, ("0-6", "7", "none"), id="2:3 uneven"),
    ],
)
def test_topology(
    num_gateways: int,
    shares: Sequence[str],
    tiny_mixtral: Path,
    traffic: Traffic,
    table: list[Row],
) -> None:
    """However many there are, and however unevenly rows go to them: the same answers."""
    row = Row(f"none, gateways:workers {num_gateways}:{len(shares)}", note=", ".join(shares))
    table.append(row)
    with expert_pool(tiny_mixtral, shares, FLOAT32) as workers, ExitStack() as stack:
        addresses = [worker.address for worker in workers]
        servers = [
            stack.enter_context(gateway(tiny_mixtral, addresses, "--threads", "1"))
            for _ in range(num_gateways)
        ]
        ports = [server.api.port for server in servers]
        # Streams do not divide evenly, so batches differ; workers without experts get no rows.
        count = 3 * traffic.workload.num_requests
        with Load(ports, traffic.workload, 2 * NUM_STREAMS + 1, count=count) as load:
            judge(load.wait(), traffic.expected, row)
        for server in servers:
            wait_idle(server.api)
        calls = [worker.state().load.calls for worker in workers]
        assert [count > 0 for count in calls] == [share != "none" for share in shares]


def test_gateway_killed(tiny_mixtral: Path, traffic: Traffic, table: list[Row]) -> None:
    """kill -9 of one of two gateways: expert workers close its streams, and nobody who asks the
    other one notices.
    """
    row = Row("kill -9 of 1 of 2 gateways", times=1)
    table.append(row)
    with expert_pool(tiny_mixtral, ("0/2", "1/2"), FLOAT32) as workers, ExitStack() as stack:
        addresses = [worker.address for worker in workers]
        survivor = stack.enter_context(gateway(tiny_mixtral, addresses, "--threads", "1"))
        before = [psutil.Process(worker.pid).num_fds() for worker in workers]
        victim = stack.enter_context(doomed_gateway(tiny_mixtral, addresses))
        with (
            Load([survivor.api.port], traffic.workload, NUM_STREAMS) as load,
            Load([victim.api.port], traffic.workload, NUM_STREAMS) as lost,
        ):
            load.wait_tokens(RUNNING_TOKENS)
            lost.wait_tokens(RUNNING_TOKENS)
            kill_tree(victim.process)
            poll(
                lambda: all(worker.state().load.streams == 1 for worker in workers),
                timeout_s=10.0,
                what="expert workers close the streams of the gateway that is gone",
            )
            load.wait_tokens(RUNNING_TOKENS)
            judge(load.finish(), traffic.expected, row)
            broken = lost.finish()
        assert changed(broken, traffic.expected) == []
        assert failed(broken) != [], "no stream was open: the test shows nothing"
        wait_idle(survivor.api)
        poll(
            lambda: all(
                psutil.Process(worker.pid).num_fds() <= num_fds
                for worker, num_fds in zip(workers, before, strict=True)
            ),
            timeout_s=10.0,
            what="expert workers hold no descriptor of the gateway that is gone",
        )
