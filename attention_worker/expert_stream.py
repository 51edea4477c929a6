"""The Forward stream to one life of one expert worker, and its direct connection if there is one.

Threads: `expert-stream-ID` opens the stream, reads replies and opens it again after a failure;
gRPC's own sender takes messages from the outbox; the model thread submits calls, never waits for
the network, and reads the direct connection while it waits for outcomes. One lock guards the
tables. `close` ends both threads. Between `open_exchange` and the next call that goes through here
the model thread may use the direct connection in compiled code, without the lock.

    opening -> up -> down (all calls failed at once) -> up ...       usable unless down or refused

Whether it is better to ask others, where there are any, is a matter of `trust`.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Sequence

import grpc

from attention_worker import forward_rpc as rpc
from attention_worker.call_times import CallTimes
from attention_worker.calls import Call, Outcome, Unfinished
from attention_worker.direct_connection import DirectConnection
from attention_worker.link import Link
from attention_worker.observed import Observed
from attention_worker.trust import Refusal, Trust
from expertmesh.placement import ExpertWorkerEntry
from expertmesh.v1 import attention_service_pb2 as attention_pb
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire_encode import CallId, RequestFrame

logger = logging.getLogger(__name__)

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.05, 2.0
DEFAULT_ROW_CREDITS = 4096  # of an expert worker that states none
MAX_WAITING_CALLS = 64  # for row credits

_LOST = "replies are lost"

Outbox = queue.SimpleQueue[RequestFrame | None]  # bounded: row credits bound what is in flight


class ExpertStream:
    """Calls to one expert worker; opens at once.

    Args:
        endpoint: Where it is.
        worker: Its name, incarnation and credits, from the expert map.
        times: Of calls; more are added.
    """

    def __init__(
        self, endpoint: rpc.ForwardEndpoint, worker: ExpertWorkerEntry, times: CallTimes
    ) -> None:
        self._endpoint = endpoint
        self.worker = worker
        self._times = times
        self._trust = Trust()
        self._lock = threading.Lock()
        self._outbox: Outbox = queue.SimpleQueue()
        self._stream: grpc.Call | None = None
        self._direct: DirectConnection | None = None
        self._last_direct: DirectConnection | None = None  # until calls over it have failed
        self._waiting: dict[Call, RequestFrame] = {}  # in order
        self._pending: dict[CallId, Call] = {}
        self._first_credits = worker.row_credits or DEFAULT_ROW_CREDITS
        self.link = Link(worker.incarnation, self._first_credits)
        """Row credits, and what else compiled code needs."""
        self._last_failure = ""
        self._down = ""
        self._refusal = Refusal()
        self._cut_reason = ""
        self._retired = False
        self._closed = threading.Event()
        self.observed = Observed(worker, self.link)
        """What is reported of it."""
        self._thread = threading.Thread(
            target=self._run, name=f"expert-stream-{worker.worker_id}", daemon=True
        )
        self._thread.start()

    # --- the model thread ---

    @property
    def usable(self) -> bool:
        """True if a call may succeed."""
        return not self._trouble

    def is_suspect(self, now_s: float) -> bool:
        """True if others are to be asked, where there are any."""
        return self._trust.is_suspect(now_s)

    def wants_probe(self, now_s: float) -> bool:
        """True once each time that it should get a probe, as it has long been silent."""
        with self._lock:
            if not self.usable or not self._trust.wants_probe(now_s):
                return False
            if any(call.is_probe for call in self._waiting):
                self._lose(_LOST, by_us=True)
                return False
            self.observed.count_ejections(self._trust.num_probes == 1)
            return True

    def describe(self) -> str:
        """The expert worker, and what is wrong with it if something is."""
        name = f"expert worker {self.worker.worker_id} at {self.worker.address}"
        return f"{name}: {self._trouble}" if self._trouble else name

    def submit(self, call: Call, frame: RequestFrame) -> None:
        """Sends a call, now or when row credits allow; its outcome is put into its queue."""
        with self._lock:
            self.link.close()
            reason = self._why_not(call)
            if not reason:
                self._waiting[call] = frame
                self._send_waiting()
        if reason:
            call.outcomes.put(Outcome(call, None, reason))

    def open_exchange(self) -> DirectConnection | None:
        """Lets compiled code use the direct connection until something else happens to the stream.

        None if all is not well, or somebody waits for something. Who gets the connection keeps it
        as long as compiled code may use it.
        """
        with self._lock:
            self.link.close()
            direct = self._direct
            is_trusted = self.usable and not self._trust.is_suspect(time.monotonic())
            is_free = is_trusted and not self._waiting
            if direct is None or direct.has_unsent or not is_free or self._is_awaited:
                return None
            self.link.open(direct)
            return direct

    def adopt(self, call: Call, left: Unfinished) -> None:
        """Takes over a call that was sent by compiled code; `on_ready` then looks for its reply."""
        with self._lock:
            self.link.close()
            if left.direct is not self._last_direct:
                call.outcomes.put(Outcome(call, None, self._last_failure, is_lost=True))
                return
            self._pending[call.call_id] = call
            self.link.rows_in_flight += call.num_rows
            if self._direct is not None and left.unsent:
                self._direct.send_later(left.unsent)
            if left.error:
                self._lose(str(OSError(left.error, os.strerror(left.error))))

    def be_late(self) -> bool:
        """A call is late: others are asked from now on; true if the log should say so."""
        with self._lock:
            self.link.close()
            return self._trust.be_late(time.monotonic())

    def abandon(self, call: Call) -> None:
        """Nobody waits for this late call any more: its reply only gives back its credits.

        If it never got any in all its time, replies are lost, and the stream starts over.
        """
        self.be_late()
        with self._lock:
            call.abandoned = True
            never_sent = self._waiting.pop(call, None) is not None
            if never_sent and time.monotonic() >= call.limit_s:
                self._lose(_LOST, by_us=True)

    def forget(self, call: Call) -> None:
        """As `abandon`, for reasons that say nothing of the expert worker."""
        with self._lock:
            call.abandoned = True
            self._waiting.pop(call, None)

    @property
    def interest(self) -> tuple[int, int]:
        """Descriptor and events of its direct connection; -1 without one."""
        direct = self._direct
        return (-1, 0) if direct is None else direct.interest

    def on_ready(self) -> None:
        """Reads and writes the direct connection, as far as it goes without waiting."""
        messages: Sequence[bytes] = ()
        with self._lock:
            if self._direct is None:
                return
            try:
                messages = self._direct.receive()
                self._direct.flush()
            except OSError as error:
                self._lose(str(error))
        for message in messages:
            self._take(rpc.read_reply(message))

    def refuse(self, reason: str) -> None:
        """Makes this life of the expert worker unusable for a while: it said so itself."""
        self.link.close()
        self._refusal.begin(reason)

    def be_wrong(self, reason: str) -> None:
        """A reply was wrong: after some it is ejected for a while."""
        with self._lock:
            self._be_wrong(reason)

    def _be_wrong(self, reason: str) -> None:
        if self._trust.be_wrong(time.monotonic(), self.observed.num_answers):
            self.observed.count_ejections(1)
            logger.warning("%s: ejected for a while: %s", self.describe(), reason)

    # --- other threads ---

    def observe(self) -> attention_pb.ExpertObservation | None:
        """What was seen since the last time; None without news."""
        seen = self.observed.take()
        if seen is None or not seen.calls:
            self.link.forgive()
        return seen

    def retire(self) -> None:
        """The expert map does not name it any more: it is not opened again after its end."""
        self._retired = True

    def close(self) -> None:
        """Ends the stream and fails its calls; returns at once."""
        self._closed.set()
        with self._lock:
            self.link.close()
            self._outbox.put(None)
            if self._stream is not None:
                self._stream.cancel()

    def join(self, timeout_s: float) -> None:
        """Waits for the end of the thread after `close`."""
        self._thread.join(timeout_s)

    # --- sending; the lock is held ---

    @property
    def _trouble(self) -> str:
        """Why no call can succeed; nothing if one may."""
        closed = "the stream is closed" if self._closed.is_set() else ""
        return self._refusal.reason() or self._down or closed

    @property
    def _is_awaited(self) -> bool:
        """True if somebody waits for a reply."""
        return any(not call.abandoned for call in self._pending.values())

    def _why_not(self, call: Call) -> str:
        if self._trouble:
            return self._trouble
        most = max(self.link.credits, self._first_credits)
        if call.num_rows > most:
            return f"{call.num_rows} rows exceed its {most} row credits"
        if len(self._waiting) >= MAX_WAITING_CALLS:
            return f"{MAX_WAITING_CALLS} calls wait for row credits already"
        return ""

    def _send_waiting(self) -> None:
        """Sends what the credits allow; a call alone always, so that its reply brings others."""
        while self._waiting:
            call, frame = next(iter(self._waiting.items()))
            rows_in_flight = self.link.rows_in_flight
            if rows_in_flight and rows_in_flight + call.num_rows > self.link.credits:
                return
            del self._waiting[call]
            self._pending[call.call_id] = call
            self.link.rows_in_flight = rows_in_flight + call.num_rows
            call.sent_s = time.monotonic()
            self.observed.count_sent(call.num_rows, frame.num_payload_bytes)
            self._send(frame)

    def _send(self, frame: RequestFrame) -> None:
        if self._direct is None:
            self._outbox.put(frame)
            return
        try:
            self._direct.send(frame)
        except OSError as error:
            self._lose(str(error))

    def _lose(self, reason: str, *, by_us: bool = False) -> None:
        """Ends the stream, which its thread opens again; `by_us` if it had not ended by itself."""
        self._be_down(reason, by_us)
        if self._stream is not None:
            self._cut_reason = self._cut_reason or reason
            self._stream.cancel()

    def _be_down(self, reason: str, by_us: bool = False) -> None:
        """From the end of a stream to its next beginning; fails what is on its way."""
        if not self._down and not self._closed.is_set() and not self._retired:
            logger.warning("%s: %s", self.describe(), reason)
        self._down = self._last_failure = reason
        self._close_direct()
        self._last_direct = None
        failed = [call for call in (*self._pending.values(), *self._waiting) if not call.abandoned]
        self._pending.clear()
        self._waiting.clear()
        self.link.rows_in_flight = 0
        self.link.credits = self._first_credits
        for call in failed:
            call.outcomes.put(Outcome(call, None, reason, is_lost=call.sent_s > 0 and not by_us))

    def _close_direct(self) -> None:
        self.link.close()
        if self._direct is not None:
            self._direct.close()
            self._direct = None

    # --- the stream's own thread ---

    def _run(self) -> None:
        backoff_s = MIN_BACKOFF_S
        while not self._closed.is_set():
            with self._endpoint.connected() as forward:
                was_up = self._serve(forward)
            backoff_s = MIN_BACKOFF_S if was_up else min(2 * backoff_s, MAX_BACKOFF_S)
            if self._retired:
                return
            self._closed.wait(backoff_s)

    def _serve(self, forward: rpc.ForwardRpc) -> bool:
        """One stream from open to end; True if it was up."""
        was_up = False
        stream = forward(iter(self._outbox.get, None))
        with self._lock:
            self._stream = stream
            if self._closed.is_set():
                stream.cancel()
        reason = "it ended the stream"
        try:
            metadata = stream.initial_metadata()  # comes as soon as the stream is up
            if was_up := stream.is_active():
                self._set_up([(key, value) for key, value in metadata])
            for reply in stream:
                self._take(reply)
        except grpc.RpcError as error:
            reason = self._cut_reason or rpc.describe_failure(error)
        self._fail_all(reason)
        return was_up

    def _set_up(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        direct = None
        try:
            direct = self._endpoint.direct(metadata)
        except OSError as error:
            logger.warning("%s: no direct connection, gRPC is used: %s", self.describe(), error)
        with self._lock:
            self._direct = self._last_direct = direct
        if self._down:
            logger.info("expert worker %s: stream is up again", self.worker.worker_id)
        self._down = ""
        self._trust.be_heard()

    def _take(self, reply: rpc.Reply) -> None:
        response, damage = reply.message, rpc.damage_of(reply)
        with self._lock:
            self._trust.be_heard()
            call = None if response is None else self._pending.pop(CallId.of(response.id), None)
            if call is not None:
                self.link.rows_in_flight -= call.num_rows
            if damage or response is None:
                self._be_damaged(damage, call)
            else:
                self._count(call, response, reply.received_s)
            self._send_waiting()
        if call is not None and not call.abandoned:
            call.outcomes.put(Outcome(call, None if damage else response, damage, bool(damage)))

    def _count(self, call: Call | None, response: pb.ForwardResponse, received_s: float) -> None:
        if call is None or (call.abandoned and not call.is_probe):
            self.observed.count_late_reply()
        if call is not None:
            took_s = received_s - call.sent_s
            self.observed.count_round_trip(took_s)
            if call.size_class:
                slowness = self.link.slowness
                self.link.slowness = self._times.see(call.size_class, slowness, took_s)
            self.link.queue_us = response.queue_us
        self.link.credits = response.row_credits or self.link.credits

    def _be_damaged(self, damage: str, call: Call | None) -> None:
        """Bytes were changed; those of which call may be unknown, and then all calls fail."""
        self.observed.count_damaged()
        self._be_wrong(damage)
        if call is None:
            self._lose(damage, by_us=True)

    def _fail_all(self, reason: str) -> None:
        """Fails what is on its way, and makes an empty outbox for the next stream."""
        self._outbox.put(None)  # ends gRPC's sender
        with self._lock:
            self._outbox = queue.SimpleQueue()
            self._be_down(reason)
            self._cut_reason = ""
