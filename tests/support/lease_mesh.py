"""Gateways that are elected by a Lease, and can be cut off from the API server one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from gateway.cluster.access import ClusterAccess
from gateway.cluster.api import ClusterApi, ClusterError
from gateway.cluster.fields import JsonObject
from gateway.placement.lease_election import LeaseElection, LeaseTimes
from tests.support.endpoint_slices import NAMESPACE
from tests.support.kube.api_server import FakeApiServer
from tests.support.kube.resources import LEASES, Json
from tests.support.kube.store import Key

LEASE = "expertmesh-leader"
TIMES = LeaseTimes(duration_s=2.0, renew_s=1.0, retry_s=0.05)
"""A busy machine may hold up all of it for a second, and no leader changes by itself."""
KEY = Key(LEASES, NAMESPACE, LEASE)


class CutApi(ClusterApi):
    """A client whose network can be cut, as for one gateway alone.

    Attributes:
        is_cut: Nothing reaches the API server.
        loses_answers: Requests of now on reach it, and their answers are lost.
    """

    is_cut = False
    loses_answers = False

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: JsonObject | None = None,
        content_type: str = "application/json",
        timeout_s: float = 10.0,
    ) -> JsonObject:
        """As ever, while there is a network."""
        is_lost = self.loses_answers
        if not self.is_cut:
            answer = await super().request(
                method, path, query=query, body=body, content_type=content_type, timeout_s=timeout_s
            )
        if self.is_cut or is_lost:
            await asyncio.sleep(min(timeout_s, 0.05))
            raise ClusterError("the network is cut")
        return answer


class Candidate:
    """One that can take part.

    Args:
        name: For `heard`.
        api: Its network.
        times: Of the election.

    Attributes:
        token: While it leads.
    """

    def __init__(self, name: str, api: CutApi, times: LeaseTimes = TIMES) -> None:
        self.name = name
        self.api = api
        self.election = LeaseElection(api, LEASE, times)
        self.token: int | None = None

    @classmethod
    async def create(
        cls, name: str, server: FakeApiServer, folder: Path, times: LeaseTimes = TIMES
    ) -> Self:
        """One with a network of its own."""
        path = server.write_kubeconfig(folder / "kubeconfig", NAMESPACE)
        api = await asyncio.to_thread(CutApi.open, ClusterAccess(str(path)))
        return cls(name, api, times)

    def start(self, heard: list[tuple[str, int | None]]) -> None:
        """Takes part.

        Args:
            heard: Takes what all candidates are told, in the order of time.
        """

        def note(token: int | None) -> None:
            self.token = token
            heard.append((self.name, token))

        self.election.start(note)

    async def stop(self) -> None:
        """Ends in order."""
        await asyncio.to_thread(self.election.stop)


def lease(server: FakeApiServer) -> Json:
    """The Lease as it is; its spec."""
    spec: Json = server.store.get(KEY)["spec"]
    return spec
