"""Loading and unloading of experts while calls go on.

Threads: `expert-loader` (one, so that the disk is read in order, and behind all other threads for
the cores) and `expert-unloader` (two) work through jobs and put progress into the job's queue,
whose reader is the RPC's handler. A job goes on when its client has left. `expert-tidy` gives
memory back some time after a job. All end with `stop`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from expert_worker.memory import check_memory, give_back_freed_memory
from expert_worker.state import WorkerState
from expert_worker.store import count_experts
from expertmesh.errors import ExpertMeshError, WireError
from expertmesh.priority import stay_behind
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import invalid

logger = logging.getLogger(__name__)

MAX_RETIRE_MS = 60_000
_MAX_JOBS = 16
_UNUSED_TIMEOUT_S = 30.0  # for the calls that use an expert when it is freed
_POLL_S = 0.5
_TIDY_EVERY_S = 5.0
_LOADER_NICENESS = 10  # a tenth of a core that others want; less, and it would keep Python's lock

ExpertIds = Sequence[tuple[int, int]]
Event = tuple[int, int, pb.ExpertState, str]
"""Layer, expert, new state, why it failed."""
Events = queue.SimpleQueue[Event | None]  # bounded: two events for each expert of a bounded job


class Maintenance:
    """Runs the jobs of LoadExperts and UnloadExperts.

    Args:
        state: The expert worker; its store is changed.
    """

    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self._store = state.store
        self._loader = ThreadPoolExecutor(1, "expert-loader", stay_behind, (_LOADER_NICENESS,))
        self._unloader = ThreadPoolExecutor(2, "expert-unloader")
        self._lock = threading.Lock()
        self._leader_token = 0
        self._tidy_at_s = 0.0  # on the monotonic clock
        self._tidier = threading.Timer(0.0, give_back_freed_memory)  # the last one that was needed
        self._num_jobs = 0

    def authorise(self, incarnation: int, leader_token: int) -> None:
        """Fencing: raises WireError for another incarnation or a leader of the past."""
        self.authorise_incarnation(incarnation)
        with self._lock:
            if leader_token < self._leader_token:
                raise WireError(
                    pb.ForwardError.CODE_STALE_INCARNATION,
                    f"leader_token is {leader_token}, but {self._leader_token} was seen already",
                )
            self._leader_token = leader_token

    def authorise_incarnation(self, incarnation: int) -> None:
        """Raises WireError for another incarnation."""
        own = self._state.identity.incarnation
        if incarnation != own:
            raise WireError(
                pb.ForwardError.CODE_STALE_INCARNATION,
                f"incarnation is {incarnation:#x}, expected {own:#x}",
            )

    def load(self, experts: ExpertIds) -> Iterator[Event]:
        """Starts loading; progress, two events for each expert. Raises WireError DRAINING."""
        self._state.check_not_draining()
        return self._start(self._loader, experts, lambda events: self._load(experts, events))

    def reload(self, layer: int, expert: int) -> None:
        """Loads an expert that was taken out of service; returns when it is there, or cannot be."""
        try:
            reached = [state for _, _, state, _ in self.load([(layer, expert)])]
        except WireError as error:
            logger.warning("layer %d expert %d is not loaded again: %s", layer, expert, error)
            return
        if pb.EXPERT_STATE_RESIDENT in reached:
            logger.info("layer %d expert %d was loaded again", layer, expert)

    def unload(self, experts: ExpertIds, retire_ms: int) -> Iterator[Event]:
        """Retires at once, frees after `retire_ms`; progress, two events for each expert."""
        if retire_ms > MAX_RETIRE_MS:
            raise invalid(f"retire_ms is {retire_ms}, expected at most {MAX_RETIRE_MS}")
        retire_s = retire_ms / 1000
        return self._start(
            self._unloader, experts, lambda events: self._unload(experts, retire_s, events)
        )

    def stop(self) -> None:
        """Lets what is running end and drops the rest. The state was stopped before."""
        for pool in (self._loader, self._unloader):
            pool.shutdown(wait=True, cancel_futures=True)
        self._tidier.cancel()
        if self._tidier.ident is not None:
            self._tidier.join()

    def _start(
        self, pool: ThreadPoolExecutor, experts: ExpertIds, job: Callable[[Events], None]
    ) -> Iterator[Event]:
        most = 2 * count_experts(self._store.config)
        if len(experts) > most:
            raise invalid(f"experts has {len(experts)} entries, expected at most {most}")
        with self._lock:
            if self._num_jobs >= _MAX_JOBS:
                raise WireError(
                    pb.ForwardError.CODE_RESOURCE_EXHAUSTED, f"{_MAX_JOBS} jobs are waiting"
                )
            self._num_jobs += 1
        events: Events = queue.SimpleQueue()
        pool.submit(self._run, job, events)
        return self._progress(events)

    def _run(self, job: Callable[[Events], None], events: Events) -> None:
        try:
            job(events)
        except Exception:
            logger.exception("a job of the expert store failed")
        finally:
            self._tidy()
            with self._lock:
                self._num_jobs -= 1
            events.put(None)

    def _tidy(self) -> None:
        """Gives memory back, at once or later: it holds up whoever allocates meanwhile."""
        with self._lock:
            wait_s = self._tidy_at_s - time.monotonic()
            if wait_s <= 0:
                self._tidy_at_s += _TIDY_EVERY_S - wait_s
            elif not self._tidier.is_alive():
                self._tidier = threading.Timer(wait_s, give_back_freed_memory)
                self._tidier.name, self._tidier.daemon = "expert-tidy", True
                self._tidier.start()
        if wait_s <= 0:
            give_back_freed_memory()

    def _progress(self, events: Events) -> Iterator[Event]:
        while not self._state.stopping:
            try:
                event = events.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if event is None:
                return
            yield event

    def _load(self, experts: ExpertIds, events: Events) -> None:
        for layer, expert in experts:
            if self._state.stopping:
                return
            if self._state.draining:
                events.put((layer, expert, pb.EXPERT_STATE_FAILED, "it is draining"))
                continue
            events.put((layer, expert, pb.EXPERT_STATE_LOADING, ""))
            error = _attempt(partial(self._load_one, layer, expert))
            events.put(_outcome(layer, expert, pb.EXPERT_STATE_RESIDENT, error))

    def _load_one(self, layer: int, expert: int) -> None:
        check_memory(self._store)
        self._store.load(layer, expert)

    def _unload(self, experts: ExpertIds, retire_s: float, events: Events) -> None:
        retired = []
        for layer, expert in experts:
            error = _attempt(partial(self._store.retire, layer, expert))
            events.put(_outcome(layer, expert, pb.EXPERT_STATE_RETIRING, error))
            if error is None:
                retired.append((layer, expert))
        if self._state.wait_stop(retire_s):
            return
        for layer, expert in retired:
            error = _attempt(partial(self._store.unload, layer, expert, _UNUSED_TIMEOUT_S))
            events.put(_outcome(layer, expert, pb.EXPERT_STATE_UNLOADED, error))


def _attempt(change: Callable[[], object]) -> str | None:
    """Why the change failed, or None."""
    try:
        change()
    except (ExpertMeshError, OSError, RuntimeError, MemoryError) as error:
        logger.warning("%s", error)
        return str(error) or type(error).__name__
    return None


def _outcome(layer: int, expert: int, reached: pb.ExpertState, error: str | None) -> Event:
    if error is None:
        return layer, expert, reached, ""
    return layer, expert, pb.EXPERT_STATE_FAILED, error
