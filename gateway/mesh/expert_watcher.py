"""Watches one expert worker: keeps its Watch stream open and reports what comes or why not.

Thread: `watch-<address>`, owned by `gateway.mesh.membership`, which also calls `check` now and
then: a stream read has no time limit of its own, so a hung or cut off expert worker is found by
that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import grpc

from expertmesh.grpc_options import channel_options
from expertmesh.transport import Transport
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.v1 import expert_service_pb2_grpc as pb_grpc

MISSED_HEARTBEATS = 3
"""Heartbeats without a snapshot after which an expert worker counts as unreachable."""
MIN_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0

Report = Callable[[str, pb.WatchResponse | str], None]
"""Takes an address and either a snapshot or the reason why there is none."""

_KEEPALIVE_MS, _PING_TIMEOUT_MS = 300, 600
"""A line that was cut is found within their sum, though nobody wants anything: gRPC's own threads
answer, even of an expert worker whose Python is too busy for the next snapshot."""
_CONNECT_MS = 500
_MAX_MESSAGE_BYTES = 2**22

_CHANNEL_OPTIONS = list(
    {
        **dict(channel_options(_MAX_MESSAGE_BYTES)),
        "grpc.keepalive_time_ms": _KEEPALIVE_MS,
        "grpc.keepalive_timeout_ms": _PING_TIMEOUT_MS,
        "grpc.http2.ping_timeout_ms": _PING_TIMEOUT_MS,
        "grpc.min_reconnect_backoff_ms": _CONNECT_MS,  # the limit of one attempt to connect
        "grpc.enable_http_proxy": 0,
    }.items()
)


class ExpertWatcher:
    """The Watch stream to one address.

    Args:
        transport: Connects to it.
        address: host:port.
        heartbeat_s: Longest time between two snapshots that the expert worker is asked for.
        report: Called in the watcher's thread with every snapshot, and once per failed try.
        hands_over: Somebody moves the experts of a draining expert worker, so it is to wait.
    """

    def __init__(
        self,
        transport: Transport,
        address: str,
        heartbeat_s: float,
        report: Report,
        *,
        hands_over: bool = False,
    ) -> None:
        self._transport = transport
        self.address = address
        self._request = pb.WatchRequest(
            heartbeat_ms=max(1, int(heartbeat_s * 1000)), hands_over=hands_over
        )
        self._limit_s = MISSED_HEARTBEATS * heartbeat_s
        self._report = report
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._call: grpc.Call | None = None
        self._due_s = 0.0
        self._overdue = False
        self._backoff_s = MIN_BACKOFF_S
        self._thread = threading.Thread(target=self._run, name=f"watch-{address}", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def check(self, now_s: float) -> None:
        """Gives up on a stream from which no snapshot came for too long."""
        with self._lock:
            if self._call is not None and now_s > self._due_s:
                self._overdue = True
                self._call.cancel()

    def stop(self) -> None:
        """Asks the thread to end."""
        self._stopping.set()
        with self._lock:
            if self._call is not None:
                self._call.cancel()

    def join(self, timeout_s: float) -> None:
        """Waits for the end of the thread."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._transport.channel(self.address, _CHANNEL_OPTIONS) as channel:
                reason = self._watch(pb_grpc.ExpertServiceStub(channel))
            if self._stopping.is_set():
                return
            self._report(self.address, reason)
            self._stopping.wait(self._backoff_s)
            self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)

    def _watch(self, stub: pb_grpc.ExpertServiceStub) -> str:
        """Reads one stream to its end; returns why it ended."""
        call = stub.Watch(self._request)
        with self._lock:
            self._call = call
            self._overdue = False
            self._due_s = time.monotonic() + self._limit_s
        if self._stopping.is_set():
            call.cancel()
        try:
            for snapshot in call:
                self._due_s = time.monotonic() + self._limit_s
                self._backoff_s = MIN_BACKOFF_S
                self._report(self.address, snapshot)
            return "it ended its state stream"
        except grpc.RpcError as error:
            return self._reason(error)
        finally:
            with self._lock:
                self._call = None

    def _reason(self, error: grpc.RpcError) -> str:
        """A short reason that is the same for every try that fails in the same way."""
        silent = f"no answer within {self._limit_s:g} s"
        if self._overdue or not isinstance(error, grpc.Call):
            return silent
        details = error.details() or ""
        for sign, reason in _REASONS:
            if sign in details:
                return reason or silent
        return f"{error.code().name}: {details[:200]}"


_REASONS = (
    ("Connection refused", "connection refused"),
    ("Connection reset", "connection lost"),
    ("Socket closed", "connection lost"),
    ("No route to host", "no route to host"),
    ("Network is unreachable", "network unreachable"),
    ("DNS resolution failed", "host name not found"),
    ("imeout", ""),
    ("timed out", ""),
    ("ping", ""),
)
"""Part of gRPC's message to our reason; empty for silence."""
