"""The gateway's attention worker: a child process behind a Unix socket, restarted when it is lost.

Threads: those of `AttentionConnection`, and `attention-restart` while a new life is being made. The
socket is in a folder that only this user can enter; folder and child are gone after `stop`.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from expertmesh import PROTOCOL_REVISION
from expertmesh.attention_settings import AttentionWorkerSettings
from expertmesh.errors import PeerError, StartupError
from expertmesh.placement import ExpertMap
from expertmesh.processes import Child, spawn
from expertmesh.v1 import attention_service_pb2 as pb
from gateway.attention.connection import AttentionConnection, Observer
from gateway.attention.map_messages import map_message
from gateway.engine.scheduler_limits import SchedulerLimits
from gateway.engine.step_messages import limits_of

logger = logging.getLogger("gateway.attention")

DESCRIBE_TIMEOUT_S = 10.0
BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Waits before the first, second, ... attempt at a new life; the last one repeats."""
MAX_QUICK_DEATHS = 4
"""More do not count: one that could start is started again within 5 s, long before the requests
that wait for it are given up."""
STABLE_LIFE_S = 60.0
"""A life at least this long starts the waits over."""
_MAX_FOLDER_LEN = 90  # a socket's path has room for 107 bytes


class AttentionClient:
    """An `AttentionPort` to a child process. Methods may be called from any thread.

    Args:
        settings: For the attention worker; `socket_path` is filled in here.
        fingerprint: Of the model that the gateway serves.
        gateway: Incarnation of the gateway.
        on_observations: Takes what the attention worker saw of expert workers, in its own thread.
        name: Of the child process.
    """

    def __init__(
        self,
        settings: AttentionWorkerSettings,
        fingerprint: bytes,
        gateway: int,
        *,
        on_observations: Observer = lambda response: None,
        name: str = "attention-worker-0",
    ) -> None:
        self._settings = settings
        self._fingerprint = fingerprint
        self._gateway = gateway
        self._on_observations = on_observations
        self._name = name
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._child: Child | None = None
        self._connection: AttentionConnection | None = None
        self._limits: SchedulerLimits | None = None
        self._map: ExpertMap | None = None
        self._subscribers: list[Callable[[], None]] = []
        self._stopping = threading.Event()
        self._restarter: threading.Thread | None = None
        self._born_s = 0.0
        self._num_quick_deaths = 0

    @property
    def pid(self) -> int | None:
        """Process id of the present life."""
        with self._lock:
            return self._child.pid if self._child else None

    def start(self) -> pb.DescribeResponse:
        """Starts the attention worker and waits until it serves; call once.

        Raises:
            StartupError: It cannot start; says why.
        """
        self._folder = _private_folder()
        return self._launch()

    def limits(self) -> SchedulerLimits | None:
        """What it has room for; None while it is down."""
        with self._lock:
            return self._limits

    def subscribe(self, on_change: Callable[[], None]) -> None:
        """Calls `on_change` whenever it goes down or comes up."""
        self._subscribers.append(on_change)

    def send(self, step: pb.StepRequest) -> None:
        """Sends a step. Raises PeerError if it is down."""
        self._live_connection().send(step)

    def receive(self, timeout_s: float) -> pb.StepResponse:
        """The next result. Raises PeerError if it is lost or the time is up."""
        return self._live_connection().receive(timeout_s)

    def update_map(self, expert_map: ExpertMap) -> None:
        """Sends an expert map, now and to each new life."""
        with self._lock:
            self._map = expert_map
            if self._connection is not None:
                self._connection.push_map(map_message(expert_map, self._gateway))

    def restart(self, reason: str) -> None:
        """Ends the present life and makes a new one in the background."""
        with self._lock:
            if self._stopping.is_set() or self._restarter is not None:
                return
            quick = time.monotonic() - self._born_s < STABLE_LIFE_S
            self._num_quick_deaths = self._num_quick_deaths + 1 if quick else 0
            self._limits = None
            self._restarter = threading.Thread(
                target=self._restart, args=(reason,), name="attention-restart", daemon=True
            )
            self._restarter.start()

    def stop(self, grace_s: float) -> None:
        """Ends the attention worker; kills it after the grace. No thread or file is left."""
        self._stopping.set()
        with self._lock:
            restarter = self._restarter
        self._end_life(grace_s)
        if restarter is not None:
            restarter.join(grace_s + 5.0)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _live_connection(self) -> AttentionConnection:
        with self._lock:
            if self._connection is None:
                raise PeerError("attention worker is down")
            return self._connection

    def _launch(self) -> pb.DescribeResponse:
        """Makes a new life. Raises StartupError."""
        assert self._folder is not None
        socket_path = str(self._folder / "attention.sock")
        Path(socket_path).unlink(missing_ok=True)
        settings = dataclasses.replace(self._settings, socket_path=socket_path)
        argv = [sys.executable, "-m", "attention_worker", "--settings", settings.to_json()]
        with self._lock:
            if self._stopping.is_set():
                raise StartupError("the gateway is stopping")
            child = self._child = spawn(argv, self._name)
        try:
            child.wait_ready(self._settings.engine.startup_timeout_s)
            return self._connect(socket_path)
        except StartupError:
            child.kill()
            child.wait(5.0)
            raise

    def _connect(self, socket_path: str) -> pb.DescribeResponse:
        connection = AttentionConnection(socket_path, self._lost, self._on_observations)
        try:
            description = connection.describe(DESCRIBE_TIMEOUT_S)
            self._check(description)
            connection.open()
            logger.info("%s: %s", self._name, _capacity(description))
        except (PeerError, StartupError) as error:
            connection.close()
            raise StartupError(str(error)) from error
        with self._lock:
            self._connection = connection
            self._limits = limits_of(description)
            self._born_s = time.monotonic()
            if self._map is not None:
                connection.push_map(map_message(self._map, self._gateway))
        return description

    def _check(self, description: pb.DescribeResponse) -> None:
        revision = description.protocol_revision
        if revision != PROTOCOL_REVISION:
            raise StartupError(
                f"attention worker has protocol revision {revision}, the gateway "
                f"{PROTOCOL_REVISION}"
            )
        theirs = description.model.fingerprint
        if theirs != self._fingerprint:
            raise StartupError(
                f"attention worker has model {theirs.hex()[:16]}, the gateway "
                f"{self._fingerprint.hex()[:16]}",
                fix="the model folder changed while it was read: start again",
            )

    def _lost(self, reason: str) -> None:
        """In the reader thread: the present life ended by itself."""
        with self._lock:
            self._limits = None
            child = self._child
        if child is not None and child.wait(0.1):
            reason = f"{self._name} {child.describe_exit()}"
        logger.error("%s", reason)
        self._notify()

    def _restart(self, reason: str) -> None:
        logger.info("restarting %s: %s", self._name, reason)
        attempt = min(self._num_quick_deaths, MAX_QUICK_DEATHS)
        self._end_life(0.0)
        while not self._stopping.wait(BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)]):
            attempt += 1
            if self._revive():
                break
        self._notify()

    def _revive(self) -> bool:
        """Makes a new life; True if it lives, and the restart is over."""
        try:
            self._launch()
        except StartupError as error:
            if not self._stopping.is_set():
                logger.error("%s cannot start: %s", self._name, error)
        with self._lock:
            if self._limits is not None:
                self._restarter = None
                return True
        self._end_life(0.0)
        return False

    def _end_life(self, grace_s: float) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
            child = self._child
            self._limits = None
        if connection is not None:
            connection.close()
        if child is not None:
            child.stop(grace_s)

    def _notify(self) -> None:
        for on_change in self._subscribers:
            on_change()


def _capacity(description: pb.DescribeResponse) -> str:
    limits = limits_of(description)
    held = limits.kv_groups.sequence_blocks(limits.max_model_len, 1)  # while it generates
    size = description.num_kv_blocks * description.kv_block_bytes / 2**20
    return (
        f"KV cache for {limits.kv_cache_tokens} tokens, or {limits.num_kv_blocks // held} "
        f"sequences of {limits.max_model_len}, in {limits.num_kv_blocks} blocks ({size:.0f} MiB), "
        f"{limits.num_request_slots} request slots, on {description.device}"
    )


def _private_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="expertmesh-"))
    if len(str(folder)) > _MAX_FOLDER_LEN:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="expertmesh-", dir="/tmp"))
    return folder
