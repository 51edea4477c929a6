"""Which expert workers can be used, folded into an expert map and a status.

Expert workers are the truth about what they hold. One is in the map if it is discovered, its Watch
stream is alive, and protocol revision, model and dtype are ours; retiring experts are left out, and
copies whose bytes are not those of others (`gateway.mesh.copy_judge`). One that drains is marked as
leaving: it is asked only for what nobody else holds.

Threads: `membership` owns everything here and is the only one to make maps; `watch-<address>`, one
per expert worker, and `arbiter` only report to it. Maps and statuses are immutable and replaced
whole.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from expertmesh.model_config import ModelConfig
from expertmesh.placement import ExpertMap, ExpertWorkerEntry
from expertmesh.transport import Plaintext, Transport
from expertmesh.v1 import expert_service_pb2 as pb
from gateway.mesh.arbiter import Answer, Arbiter, NoArbiter
from gateway.mesh.copy_judge import CopyJudge
from gateway.mesh.discovery import Discovery, Endpoints
from gateway.mesh.expert_watcher import ExpertWatcher
from gateway.mesh.member import Member
from gateway.mesh.mesh_status import ExpertWorkerState, ExpertWorkerStatus, MeshStatus
from gateway.mesh.worker_report import (
    KnownWorker,
    ServedIdentity,
    WorkerReport,
    read_snapshot,
)
from gateway.placement.expert_load import life_of

__all__ = ["ExpertWorkerState", "ExpertWorkerStatus", "Membership", "MeshStatus", "ServedIdentity"]

logger = logging.getLogger("gateway.membership")

HEARTBEAT_S = 1.0
COPIES_INTERVAL_S = 0.25
"""Between two maps that differ by further copies only."""
_CHECKS_PER_HEARTBEAT = 4
_JOIN_S = 2.0

MapListener = Callable[[ExpertMap], None]
NewsListener = Callable[[], None]


class Membership:
    """Follows expert workers and tells listeners about new maps.

    Args:
        discovery: Where expert workers may be.
        served: What they must serve.
        config: Which experts there are.
        colocated: The experts are in the attention worker; no expert worker is needed.
        allow_degraded: Requests are served without the experts that nobody holds.
        hands_over: A leader moves experts, so that expert workers that drain are to wait for it.
        heartbeat_s: Longest time between two snapshots of an expert worker.
        transport: Connects to them; plain text by default.
        arbiter: Knows who is right where copies of an expert differ.
    """

    def __init__(
        self,
        discovery: Discovery,
        served: ServedIdentity,
        config: ModelConfig,
        *,
        colocated: bool = False,
        allow_degraded: bool = False,
        hands_over: bool = False,
        heartbeat_s: float = HEARTBEAT_S,
        transport: Transport | None = None,
        arbiter: Arbiter | None = None,
    ) -> None:
        self._transport = transport or Plaintext()
        self._arbiter = arbiter or NoArbiter()
        self._judge = CopyJudge(self._arbiter.ask)
        self._discovery = discovery
        self._served = served
        self._config = config
        self._colocated = colocated
        self._allow_degraded = allow_degraded
        self._hands_over = hands_over
        self._heartbeat_s = heartbeat_s
        self._members: dict[str, Member] = {}
        self._listeners: list[MapListener] = []
        self._news_listeners: list[NewsListener] = []
        # At most one report per address and heartbeat, one more per change of an expert worker.
        self._news: queue.SimpleQueue[_News | None] = queue.SimpleQueue()
        self._map = ExpertMap.empty(config)
        self._map_s = 0.0
        self._known: tuple[KnownWorker, ...] = ()
        self._all_heard = False
        self._status = self._make_status({})
        self._mixed = False
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)

    @property
    def expert_map(self) -> ExpertMap:
        """The present map; may be read from any thread."""
        return self._map

    def status(self) -> MeshStatus:
        """The present status; may be read from any thread."""
        return self._status

    def known_workers(self) -> tuple[KnownWorker, ...]:
        """Expert workers that answer and fit, by id; may be called from any thread."""
        return self._known

    @property
    def all_heard(self) -> bool:
        """True if all discovered expert workers have answered once; from any thread."""
        return self._all_heard

    def subscribe_news(self, on_news: NewsListener) -> None:
        """Calls `on_news` when an expert worker says something. Call before `start`."""
        self._news_listeners.append(on_news)

    def subscribe(self, on_map: MapListener) -> None:
        """Calls `on_map` with every new map, in the membership thread. Call before `start`."""
        self._listeners.append(on_map)

    def start(self) -> None:
        """Starts discovery and watching."""
        self._thread.start()
        self._arbiter.start(self._news.put)
        self._discovery.start(lambda endpoints: self._news.put(_Discovered(endpoints)))

    def stop(self) -> None:
        """Ends discovery and watching; no thread is left."""
        self._discovery.stop()
        self._arbiter.stop()
        self._news.put(None)
        if self._thread.ident is not None:
            self._thread.join(2 * _JOIN_S)

    def _run(self) -> None:
        while (news := self._next_news()) is not None:
            self._take(news)
            now_s = time.monotonic()
            for member in self._members.values():
                member.watcher.check(now_s)
                if member.news(now_s):
                    _log_status(member.status)
        self._drop(set(self._members))

    def _next_news(self) -> _News | None:
        """What comes next; None at the end; a look at the clock if nothing comes."""
        pause_s = self._heartbeat_s / _CHECKS_PER_HEARTBEAT
        try:
            return self._news.get(timeout=pause_s if self._members else None)
        except queue.Empty:
            return _Tick()

    def _take(self, news: _News) -> None:
        if isinstance(news, _Discovered):
            self._follow(news.endpoints)
        elif isinstance(news, Answer):
            self._judge.take(news)
        elif isinstance(news, _Report) and (member := self._members.get(news.address)):
            if isinstance(news.content, str):
                self._lose(member, news.content)
            else:
                self._read(member, news.content)
        if self._news.empty():  # a burst of snapshots, as experts are loaded, makes one map
            self._fold()
            if not isinstance(news, _Tick):
                for listener in self._news_listeners:
                    listener()

    def _follow(self, endpoints: Endpoints) -> None:
        self._drop(set(self._members) - {endpoint.address for endpoint in endpoints})
        for endpoint in endpoints:
            address = endpoint.address
            if address in self._members:
                self._members[address].find(endpoint)
                continue
            watcher = ExpertWatcher(
                *(self._transport, address, self._heartbeat_s, self._report),
                hands_over=self._hands_over,
            )
            state = ExpertWorkerState.UNREACHABLE
            report = WorkerReport(ExpertWorkerStatus("", address, state, "not reached yet"))
            self._members[address] = Member(watcher, endpoint, report, time.monotonic())
            watcher.start()

    def _drop(self, addresses: set[str]) -> None:
        dropped = [self._members.pop(address) for address in addresses]
        for member in dropped:
            member.watcher.stop()
        for member in dropped:
            member.watcher.join(_JOIN_S)

    def _report(self, address: str, content: pb.WatchResponse | str) -> None:
        """In a watcher's thread."""
        self._news.put(_Report(address, content))

    def _lose(self, member: Member, reason: str) -> None:
        old = member.status
        state = ExpertWorkerState.UNREACHABLE
        member.hear(WorkerReport(ExpertWorkerStatus(old.worker_id, old.address, state, reason)))

    def _read(self, member: Member, snapshot: pb.WatchResponse) -> None:
        address = member.status.address
        report = read_snapshot(snapshot, address, self._served, self._config)
        if report.entry is not None and (other := self._namesake(report.entry)) is not None:
            worker_id, state = report.entry.worker_id, ExpertWorkerState.INCOMPATIBLE
            message = f"worker id {worker_id} is also used by {other}, expected another one"
            report = WorkerReport(ExpertWorkerStatus(worker_id, address, state, message))
        member.hear(report)
        member.numerics = snapshot.numerics_fingerprint

    def _namesake(self, entry: ExpertWorkerEntry) -> str | None:
        """Address of another routable expert worker with the same id."""
        for address, member in self._members.items():
            same = member.entry is not None and member.entry.worker_id == entry.worker_id
            if same and address != entry.address:
                return address
        return None

    def _fold(self) -> None:
        """Makes the next map if anything routable changed, and the status in any case."""
        reports = self._judged()
        entries = [report.entry for report in reports.values() if report.entry is not None]
        old, candidate = self._map, self._map.replaced(entries)
        changed = candidate.workers != old.workers and self._is_due(old, candidate)
        if changed:
            self._map, self._map_s = candidate, time.monotonic()
        known = [report.known for report in reports.values() if report.known is not None]
        self._known = tuple(sorted(known, key=lambda worker: worker.view.worker_id))
        self._all_heard = all(m.status.worker_id for m in self._members.values())
        self._status = self._make_status({at: report.status for at, report in reports.items()})
        if changed:
            self._tell(old)

    def _judged(self) -> dict[str, WorkerReport]:
        """Address to report, without the copies that are not to be used."""
        known = [m.report.known for m in self._members.values() if m.report.known is not None]
        self._judge.hear({life_of(worker.view): worker.copies for worker in known})
        return {at: self._judge.judged(member.report) for at, member in self._members.items()}

    def _is_due(self, old: ExpertMap, new: ExpertMap) -> bool:
        """False for further copies alone, a moment after the last map: they come by the hundreds,
        and each map makes attention workers look at all of it again."""
        is_early = time.monotonic() - self._map_s < COPIES_INTERVAL_S
        return not (is_early and _lives(old) == _lives(new) and new.only_adds_copies_to(old))

    def _tell(self, old: ExpertMap) -> None:
        new = self._map
        notable = _headline(new) != _headline(old)
        logger.log(
            logging.INFO if notable else logging.DEBUG,
            "expert map %d: %d expert worker%s, %d of %d experts covered",
            new.epoch,
            len(new.workers),
            "" if len(new.workers) == 1 else "s",
            new.num_covered,
            new.num_pairs,
        )
        self._warn_of_mixed_numerics()
        for listener in self._listeners:
            listener(new)

    def _warn_of_mixed_numerics(self) -> None:
        numerics = {m.numerics for m in self._members.values() if m.entry is not None}
        mixed = len(numerics) > 1
        if mixed and not self._mixed:
            logger.warning(
                "expert workers have different numerics: a retry on another copy may change the "
                "last bits of a result"
            )
        self._mixed = mixed

    def _make_status(self, by_address: Mapping[str, ExpertWorkerStatus]) -> MeshStatus:
        statuses = tuple(by_address[address] for address in sorted(by_address))
        uncovered = {} if self._colocated else self._map.uncovered()
        degraded = bool(uncovered) and self._allow_degraded and self._map.num_covered > 0
        message = "degraded: experts that nobody holds are left out" if degraded else ""
        ready = degraded or not uncovered
        return MeshStatus(
            self._map.epoch, statuses, uncovered, ready, message, self._judge.num_wrong
        )


def _log_status(status: ExpertWorkerStatus) -> None:
    good = status.state is ExpertWorkerState.READY
    if status.state is ExpertWorkerState.UNREACHABLE and not status.worker_id:
        logger.warning(
            "no expert worker answers at %s yet: %s; trying on", status.address, status.message
        )
        return
    logger.log(
        logging.INFO if good else logging.WARNING,
        "expert worker %s at %s is %s%s",
        status.worker_id,
        status.address,
        status.state,
        f": {status.message}" if status.message else f" with {status.num_experts} experts",
    )


def _headline(expert_map: ExpertMap) -> tuple[tuple[tuple[str, int, bool], ...], bool]:
    """What is worth a line in the log: who is there, and whether all experts are covered."""
    return _lives(expert_map), not expert_map.uncovered()


def _lives(expert_map: ExpertMap) -> tuple[tuple[str, int, bool], ...]:
    """Who is there."""
    return tuple(
        (worker.worker_id, worker.incarnation, worker.leaving) for worker in expert_map.workers
    )


@dataclass(frozen=True)
class _Discovered:
    """Discovery has other endpoints."""

    endpoints: Endpoints


@dataclass(frozen=True)
class _Report:
    """A watcher has a snapshot, or the reason why there is none."""

    address: str
    content: pb.WatchResponse | str


@dataclass(frozen=True)
class _Tick:
    """Nothing happened; time to look for silent expert workers."""


_News = _Discovered | _Report | _Tick | Answer
