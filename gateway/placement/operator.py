"""What an operator can ask of the placement; and the answer where nothing is placed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from expertmesh.errors import ExpertMeshError
from gateway.placement.report import PlacementReport
from gateway.placement.state import Experts, PlacementPolicy


class UnknownWorkerError(ExpertMeshError):
    """There is no expert worker of that name.

    Args:
        worker_id: The name.
        known: All there are.
    """

    def __init__(self, worker_id: str, known: Sequence[str]) -> None:
        there = ", ".join(known) or "none"
        super().__init__(f"there is no expert worker {worker_id}; there are {there}")


class PlacementRefusedError(ExpertMeshError):
    """It cannot be done as things are; the message says why."""


class Operator(Protocol):
    """The placement of experts, as an operator sees it. Methods may be called from any thread."""

    def start(self) -> None:
        """Begins."""

    def stop(self) -> None:
        """Ends; no thread is left."""

    def report(self) -> PlacementReport:
        """How things are."""

    def rebalance(self) -> None:
        """Plans at once, and for every gain in evenness.

        Raises:
            PlacementRefusedError: Another gateway leads, or nobody.
        """

    def drain(self, worker_id: str) -> None:
        """Tells an expert worker to hand over what it holds and to end.

        Raises:
            UnknownWorkerError: There is none of that name.
            PlacementRefusedError: What it holds would fit nowhere else, or nobody would move it.
        """


class StaticPlacement:
    """Expert workers hold what they were started with, or there are none."""

    def start(self) -> None:
        """Nothing runs."""

    def stop(self) -> None:
        """Nothing runs."""

    def report(self) -> PlacementReport:
        """Nothing is planned."""
        return PlacementReport(Experts((), 0, 1), PlacementPolicy(min_copies=1))

    def rebalance(self) -> None:
        """Refused."""
        raise PlacementRefusedError(_STATIC)

    def drain(self, worker_id: str) -> None:
        """Refused."""
        raise PlacementRefusedError(_STATIC)


_STATIC = "placement is static: expert workers hold what they were started with"
