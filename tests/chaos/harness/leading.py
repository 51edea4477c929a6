"""Gateways that lead the placement of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.harness.pool import PoolWorker
from tests.support.api import Api
from tests.support.mesh import Server, gateway
from tests.support.processes import poll

PLACED_TIMEOUT_S = 60.0


@contextmanager
def led_by_gateway(
    model: Path, workers: Sequence[PoolWorker], lock: Path, *, min_copies: int = 2
) -> Iterator[Server]:
    """A gateway that leads, or follows another one with the same lock."""
    flags = ("--threads", "1", "--min-copies", str(min_copies), "--leader-lock", str(lock))
    addresses = [worker.address for worker in workers]
    with gateway(model, addresses, *flags, placement="auto") as server:
        yield server


def wait_placed(api: Api, num_workers: int, *, min_copies: int = 2) -> None:
    """Waits until so many workers hold copies enough of each expert, and nothing is to be moved."""

    def is_placed() -> bool:
        report = api.get("/admin/placement").json
        return (
            report["leader"]
            and len(report["workers"]) == num_workers
            and report["fewest_copies"] >= min_copies
            and not (report["plan"] or {}).get("moves")
        )

    poll(is_placed, timeout_s=PLACED_TIMEOUT_S, what=f"{num_workers} workers hold all experts")
