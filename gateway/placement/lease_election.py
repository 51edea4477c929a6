"""Election by a Lease of Kubernetes: who writes its name into it leads, while it renews it.

The holder stops leading when it could not renew for two thirds of the Lease's duration, counted
from before its last renewal was sent; others take over when they have seen no change for the whole
duration, counted from after they saw the last one. So no two lead at a time, whatever their clocks
say, unless one of them is frozen meanwhile; fencing tokens are for that. See ADR 0018.

Thread: `election`, with an event loop, owns everything here.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
import uuid
from dataclasses import dataclass
from http import HTTPStatus

from gateway.cluster.api import ClusterApi, ClusterError
from gateway.cluster.backoff import Backoff
from gateway.cluster.loop_thread import LoopThread
from gateway.placement.election import OnChange
from gateway.placement.lease_record import LeaseRecord

logger = logging.getLogger("gateway.election")

_RELEASE_S = 1.0
_JOIN_S = 3.0


@dataclass(frozen=True)
class LeaseTimes:
    """The clockwork of an election, in seconds."""

    duration_s: float = 15.0
    """Without a sign of the holder, until others take over."""
    renew_s: float = 10.0
    """Without a renewal, until the holder leads no more; less than `duration_s`."""
    retry_s: float = 2.0
    """Between two renewals, and between two looks of others."""

    @classmethod
    def of(cls, duration_s: float) -> LeaseTimes:
        """The others in the usual proportions."""
        return cls(duration_s, duration_s * 2 / 3, duration_s * 2 / 15)


class LeaseElection:
    """Leads while it holds a Lease.

    Args:
        api: Of the cluster; closed at the end.
        name: Of the Lease, in the gateway's own namespace; it is made if it is not there.
        times: The same for all who take part.
    """

    def __init__(self, api: ClusterApi, name: str, times: LeaseTimes = LeaseTimes()) -> None:
        self._api = api
        self._name = name
        self._times = times
        # Another one for each life of a gateway: nobody goes on with the term of its predecessor.
        self._holder = f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{api.namespace}/leases"
        self._backoff = Backoff(times.retry_s, times.duration_s)
        self._seen: tuple[str, int, str] | None = None
        self._seen_s = 0.0
        self._highest_token = 0
        self._term: LeaseRecord | None = None
        """What we hold."""
        self._problem = ""
        self._on_change: OnChange = lambda token: None
        self._thread = LoopThread("election", self._run)

    def start(self, on_change: OnChange) -> None:
        """Takes part."""
        self._on_change = on_change
        self._thread.start()

    def stop(self) -> None:
        """Gives the Lease back; the thread has ended when this returns."""
        self._thread.stop(_JOIN_S)

    async def _run(self) -> None:
        try:
            while True:
                taken_s = await self._campaign()
                await self._lead(taken_s)
        finally:
            await self._release()
            await self._api.close()

    # --- while another leads, or nobody

    async def _campaign(self) -> float:
        """Waits for the Lease and takes it; returns when that was sent, by the monotonic clock."""
        while True:
            try:
                began_s = time.monotonic()
                is_taken = await self._try()
                self._problem = ""
                self._backoff.reset()
                if is_taken:
                    return began_s
                pause_s = self._times.retry_s * random.uniform(0.8, 1.2)
            except ClusterError as error:
                self._say(error)
                pause_s = self._backoff.next_s(error.retry_after_s)
            await asyncio.sleep(pause_s)

    async def _try(self) -> bool:
        """Looks at the Lease and takes it if it may."""
        record = await self._read()
        self._observe(record)
        if not self._is_free(record):
            return False
        try:
            term = await self._write(record.taken(self._holder, self._times.duration_s))
            if term.token <= self._highest_token:  # made anew by a server whose clock goes back
                term = await self._write(term.above(self._highest_token))
        except ClusterError as error:
            if error.status != HTTPStatus.CONFLICT:
                raise
            return False  # another one was quicker
        self._term = term
        self._highest_token = term.token
        return True

    def _observe(self, record: LeaseRecord) -> None:
        """Notes when the Lease was first seen as it is."""
        self._highest_token = max(self._highest_token, record.token)
        seen = (record.holder, record.num_terms, record.renewed)
        if seen != self._seen:
            self._seen, self._seen_s = seen, time.monotonic()

    def _is_free(self, record: LeaseRecord) -> bool:
        """Nobody holds it, or its holder has not shown for too long. Our own name is in it only if
        a write was carried out of which we did not hear."""
        if record.holder in ("", self._holder):
            return True
        duration_s = max(self._times.duration_s, record.duration_s)
        return time.monotonic() - self._seen_s >= duration_s

    # --- while we lead

    async def _lead(self, taken_s: float) -> None:
        """Tells that we lead, and when we don't any more."""
        assert self._term is not None, "it was taken"
        token = self._term.token
        logger.info(
            "leads the placement of experts by Lease %s, fencing token %d", self._name, token
        )
        self._on_change(token)
        try:
            await self._keep(taken_s)
        except ClusterError as error:
            logger.warning("leads no more: %s", error)
            self._term = None
        finally:
            self._on_change(None)

    async def _keep(self, renewed_s: float) -> None:
        """Renews.

        Args:
            renewed_s: When the last renewal was sent.

        Raises:
            ClusterError: The Lease is another's, or could not be renewed in time.
        """
        while True:
            until_s = renewed_s + self._times.renew_s
            await asyncio.sleep(min(self._times.retry_s, max(0.0, until_s - time.monotonic())))
            began_s = time.monotonic()
            try:
                await self._renew(until_s)
                renewed_s, self._problem = began_s, ""
            except ClusterError as error:
                self._say(error)
                if self._term is None or time.monotonic() >= until_s:
                    raise

    async def _renew(self, until_s: float) -> None:
        """One try; `_term` is None afterwards if the Lease is not ours any more."""
        assert self._term is not None, "it is ours"
        term = self._term
        try:
            self._term = await self._write(term.renewed_now(), until_s)
        except ClusterError as error:
            if error.status not in (HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND):
                raise
            current = await self._read(until_s)
            if (current.holder, current.token) != (self._holder, term.token):
                self._term = None
                raise
            self._term = await self._write(current.renewed_now(), until_s)

    async def _release(self) -> None:
        """Lets others lead at once; they would wait otherwise, so it need not succeed."""
        term, self._term = self._term, None
        if term is None:
            return
        try:
            await self._write(term.released(), time.monotonic() + _RELEASE_S)
        except ClusterError as error:
            logger.info("Lease %s was not given back: %s", self._name, error)

    # --- requests

    async def _read(self, until_s: float | None = None) -> LeaseRecord:
        """The Lease; an empty record if there is none."""
        path = f"{self._path}/{self._name}"
        try:
            answer = await self._api.request("GET", path, timeout_s=self._left_s(until_s))
        except ClusterError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            return LeaseRecord()
        return LeaseRecord.read(answer)

    async def _write(self, record: LeaseRecord, until_s: float | None = None) -> LeaseRecord:
        """The Lease as it is afterwards; conflicts if it was changed since it was read."""
        method, path = (
            ("PUT", f"{self._path}/{self._name}") if record.version else ("POST", self._path)
        )
        body = record.to_lease(self._name, self._api.namespace)
        answer = await self._api.request(method, path, body=body, timeout_s=self._left_s(until_s))
        return LeaseRecord.read(answer)

    def _left_s(self, until_s: float | None) -> float:
        """Seconds for a request: some at least, and so few that there is time for another one."""
        most_s = self._times.renew_s / 2
        return most_s if until_s is None else min(most_s, max(0.01, until_s - time.monotonic()))

    def _say(self, error: ClusterError) -> None:
        """Logs what is wrong, once."""
        if str(error) != self._problem:
            logger.warning("Lease %s: %s", self._name, error)
        self._problem = str(error)
