"""The engine: one thread that turns requests into tokens, step by step.

    take commands -> schedule -> send step -> wait for the result -> commit -> publish

Owner of scheduler, block tables and output streams: the thread `engine`. Other threads reach it
through the inbox only; outputs go to the event loop, in one call per turn. The thread blocks on the
inbox while there is nothing to do.

What can go wrong, and who notices: an abandoned step (experts missing) is scheduled again on a
newer expert map, and ends its requests after the hold time; a failed step ends the requests in it;
a lost or hung attention worker ends the running requests and is restarted, while waiting ones wait.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable

from expertmesh.errors import (
    EngineError,
    OverloadedError,
    PeerError,
    RequestError,
    StartupError,
)
from expertmesh.settings import EngineSettings
from expertmesh.v1 import attention_service_pb2 as pb
from gateway.attention_port import AttentionPort
from gateway.engine_observer import EngineObserver
from gateway.expert_hold import ExpertHold, unavailable_error
from gateway.inbox import Commands, EngineLoad, Inbox, QueueLimits
from gateway.outbox import Outbox
from gateway.output_stream import OutputStream
from gateway.request_state import RequestState, ScheduledStep
from gateway.scheduler import Scheduler, SchedulerLimits
from gateway.sequence import (
    DispatchStats,
    EngineStats,
    FinishReason,
    GenerationRequest,
    RequestOutput,
)
from gateway.step_messages import step_message, token_logprobs
from gateway.tokenizer import Tokenizer

logger = logging.getLogger("gateway.engine")

ATTENTION_HOLD_S = 30.0
"""Longest time that queued requests wait for an attention worker to come back."""
MAX_FAILURES = 3
"""Failed steps in a row after which the attention worker is restarted."""
_STEP_LIMIT_SHARE = 0.9  # its own time limit, so that it answers before it counts as hung


class Engine:
    """Generates tokens for requests. Public methods may be called from any thread.

    Args:
        attention: An attention worker that is up.
        settings: Limits and times.
        loop: Event loop whose thread calls the sinks.
        tokenizer: For text and stop strings; None without one.
        eos_token_ids: Tokens that end an output.
        observer: Told about requests and steps.
        dispatch: Gives totals of the calls to expert workers, for `stats`.

    Raises:
        StartupError: The attention worker is down.
    """

    def __init__(
        self,
        attention: AttentionPort,
        settings: EngineSettings,
        loop: asyncio.AbstractEventLoop,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Collection[int] = (),
        observer: EngineObserver | None = None,
        dispatch: Callable[[], tuple[DispatchStats, ...]] = tuple,
    ) -> None:
        limits = attention.limits()
        if limits is None:
            raise StartupError("the attention worker ended right after its start")
        self._attention = attention
        self._settings = settings
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._observer = observer or EngineObserver()
        self._dispatch = dispatch
        self._limits = limits
        self._scheduler = Scheduler(limits)
        self._streams: dict[str, OutputStream] = {}
        self._outbox = Outbox(loop)
        self._hold = ExpertHold(settings.experts_hold_s)
        self._down_since_s: float | None = None
        self._num_failures = 0
        self._num_preemptions = 0
        queue = QueueLimits(settings.max_num_queued_reqs, settings.max_num_queued_tokens)
        self._inbox = Inbox(queue, EngineLoad(num_free_slots=limits.num_request_slots))
        self._stats = self._measure()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        attention.subscribe(self._inbox.poke)

    # ---- any thread ----

    def start(self) -> None:
        """Starts the engine thread."""
        self._thread.start()

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request; its outputs go to its sink, the last one with a finish reason.

        Raises:
            OverloadedError: Too much waits, or requests cannot be taken at the moment.
            RequestError: It can never fit, or its id is in use.
        """
        self._limits.check_fits(len(request.prompt_token_ids))
        if self._down_since_s is not None:
            raise OverloadedError("the attention worker is restarting", retry_after_s=5.0)
        self._inbox.put_request(request)

    def cancel(self, request_id: str) -> None:
        """Ends a request with FinishReason.ABORT; no effect on one that is unknown or ended.

        Its slot and blocks are free after the step in flight.
        """
        self._inbox.put_cancel(request_id)

    def map_changed(self) -> None:
        """There is a newer expert map: an abandoned step is tried again at once."""
        self._inbox.poke(map_changed=True)

    def stats(self) -> EngineStats:
        """Load after the last turn; waiting includes requests not yet taken."""
        return dataclasses.replace(
            self._stats,
            num_waiting=self._inbox.num_waiting,
            alive=self._thread.is_alive(),
            dispatch=self._dispatch(),
        )

    @property
    def ready(self) -> bool:
        """False while the attention worker is down, and after the end."""
        return self._down_since_s is None and self._thread.is_alive()

    @property
    def limits(self) -> SchedulerLimits:
        """What the attention worker has room for."""
        return self._limits

    def stop(self, timeout_s: float) -> bool:
        """Ends all requests with an error, and the thread after the step in flight.

        Returns:
            False if it has not ended in time: the step hangs until its attention worker is stopped.
        """
        self._inbox.stop()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- engine thread ----

    def _run(self) -> None:
        going_on = True
        while going_on:
            try:
                going_on = self._turn()
            except Exception as error:  # a mistake of ours must not leave clients hanging
                logger.exception("the engine failed; ending all requests")
                self._recover(error)
        self._end(self._scheduler_states(), EngineError("the server is shutting down"))
        self._publish()

    def _turn(self) -> bool:
        commands = self._inbox.take(self._patience_s(time.monotonic()))
        self._obey(commands)
        if commands.stop:
            return False
        self._look_after_attention()
        if self._may_step(time.monotonic()):
            self._step()
        self._publish()
        return True

    def _patience_s(self, now_s: float) -> float | None:
        """How long to wait for commands; None if only a command can make work."""
        if not self._scheduler.has_work:
            return None
        if self._down_since_s is not None:
            return max(0.0, self._down_since_s + ATTENTION_HOLD_S - now_s)
        return self._hold.wait_s(now_s)

    def _may_step(self, now_s: float) -> bool:
        up = self._down_since_s is None
        return up and self._scheduler.has_work and self._hold.wait_s(now_s) <= 0

    def _obey(self, commands: Commands) -> None:
        for request in commands.requests:
            self._add(request)
        for request_id in commands.cancelled:
            state = self._scheduler.get(request_id)
            if state is not None:
                self._end([state], None)
        if commands.map_changed:
            self._hold.retry_now()
        if not self._scheduler.has_work:
            self._hold.clear()

    def _add(self, request: GenerationRequest) -> None:
        try:
            state = self._scheduler.add(request)
        except RequestError as error:  # limits changed since it was checked at the door
            self._outbox.add(request.sink, _failure(request, error))
            self._inbox.forget(request.request_id)
            return
        self._streams[request.request_id] = OutputStream(
            state, self._tokenizer, self._eos_token_ids, self._observer
        )

    def _step(self) -> None:
        held = self._hold.active and bool(self._scheduler.running)
        step = self._scheduler.schedule(admit=not held)
        assert step is not None, f"nothing scheduled of {len(self._streams)} requests"
        self._tell_scheduled(step)
        try:
            response = self._execute(step)
        except PeerError as error:
            self._lose_attention(str(error))
            return
        if response.status == pb.StepResponse.STATUS_DONE:
            self._commit(step, response)
        elif response.status == pb.StepResponse.STATUS_PAUSED:
            self._pause(step, response)
        else:
            self._fail(step, response.message or "no reason was given")

    def _execute(self, step: ScheduledStep) -> pb.StepResponse:
        timeout_s = self._settings.step_timeout_s
        limit_ms = max(1, int(timeout_s * _STEP_LIMIT_SHARE * 1000))
        self._attention.send(step_message(step, limit_ms, self._eos_token_ids))
        response = self._attention.receive(timeout_s)
        if response.step != step.step:
            raise PeerError(f"attention worker answered step {response.step}, expected {step.step}")
        return response

    def _tell_scheduled(self, step: ScheduledStep) -> None:
        self._tell_load()
        for state in step.admitted:
            self._streams[state.request_id].started()
        for state in step.preempted:
            logger.info("preempted request %s: KV blocks ran out", state.request_id)
            self._num_preemptions += 1
            self._observer.request_preempted(state.request)

    def _commit(self, step: ScheduledStep, response: pb.StepResponse) -> None:
        nonfinite = set(response.nonfinite_slots)
        tokens = {token.slot: token for token in response.sampled if token.slot not in nonfinite}
        due = [entry for entry in step.entries if entry.sample and entry.current]
        silent = self._scheduler.commit(
            step, {slot: token.token_id for slot, token in tokens.items()}
        )
        for entry in due:
            if entry.slot in tokens:
                self._push(entry.state, tokens[entry.slot])
        broken = [e.state for e in step.entries if e.current and e.slot in nonfinite]
        self._end(broken, EngineError("the model's output is not a finite number"))
        mute = [state for state in silent if state not in broken]
        self._end(mute, EngineError("the attention worker returned no token"))
        self._num_failures = 0
        if self._hold.active:
            logger.info("experts are back after %.1f s", self._hold.held_s(time.monotonic()))
            self._hold.clear()
        self._observer.step_done(
            step.num_tokens, response.duration_us / 1e6, response.expert_wait_us / 1e6
        )

    def _push(self, state: RequestState, token: pb.SampledToken) -> None:
        stream = self._streams[state.request_id]
        output = stream.push(token_logprobs(token), self._limits.max_model_len)
        self._outbox.add(state.request.sink, output)
        if output.finish_reason is not None:
            self._forget(state)

    def _pause(self, step: ScheduledStep, response: pb.StepResponse) -> None:
        self._scheduler.rewind(step)
        missing = tuple((expert.layer, expert.expert) for expert in response.missing)
        error = unavailable_error(missing, response.message)
        self._observer.step_paused(missing)
        if not self._hold.active:
            logger.warning("holding %d requests: %s", len(step.entries), error)
        now_s = time.monotonic()
        self._hold.pause(now_s)
        if self._hold.expired(now_s):
            logger.error("ending %d requests: %s", len(step.entries), error)
            self._end([entry.state for entry in step.entries], error)

    def _fail(self, step: ScheduledStep, message: str) -> None:
        logger.error("step %d failed: %s", step.step, message)
        self._observer.engine_failed(message)
        self._end([entry.state for entry in step.entries], EngineError(f"step failed: {message}"))
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            self._lose_attention(f"{self._num_failures} steps failed in a row")

    def _look_after_attention(self) -> None:
        limits = self._attention.limits()
        if self._down_since_s is None:
            if limits is None:
                self._lose_attention("attention worker ended")
        elif limits is not None:
            self._limits = limits
            error = EngineError("the attention worker came back with less room")
            self._end(self._scheduler.reset(limits), error)
            self._down_since_s = None
            logger.info("attention worker is back")
        elif time.monotonic() - self._down_since_s >= ATTENTION_HOLD_S:
            self._end(self._scheduler_states(), EngineError("the attention worker is down"))

    def _lose_attention(self, reason: str) -> None:
        running = list(self._scheduler.running)
        logger.error("lost the attention worker, ending %d requests: %s", len(running), reason)
        self._observer.engine_failed(reason)
        self._down_since_s = time.monotonic()
        self._num_failures = 0
        self._hold.clear()
        self._end(running, EngineError(reason))
        self._attention.restart(reason)

    def _recover(self, error: Exception) -> None:
        """After a mistake of ours nothing is trusted: all requests end, everything starts over."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            self._outbox.add(
                stream.request.sink, _failure(stream.request, EngineError(f"{error!r}"))
            )
            self._inbox.forget(stream.request.request_id)
        self._scheduler = Scheduler(self._limits)
        self._lose_attention("internal error")
        self._publish()

    def _end(self, states: Iterable[RequestState], error: Exception | None) -> None:
        """Ends requests with an error, or as aborted without one."""
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        for state in states:
            output = self._streams[state.request_id].end(reason, error)
            self._outbox.add(state.request.sink, output)
            self._forget(state)

    def _forget(self, state: RequestState) -> None:
        self._scheduler.finish(state.request_id)
        del self._streams[state.request_id]
        self._inbox.forget(state.request_id)

    def _scheduler_states(self) -> list[RequestState]:
        return [*self._scheduler.running, *self._scheduler.waiting]

    def _publish(self) -> None:
        """Tells the world about a turn: load and outputs."""
        self._tell_load()
        self._outbox.publish()

    def _tell_load(self) -> None:
        scheduler = self._scheduler
        self._inbox.update_load(
            EngineLoad(
                len(scheduler.waiting), scheduler.num_waiting_tokens, scheduler.num_free_slots
            )
        )
        self._stats = self._measure()

    def _measure(self) -> EngineStats:
        scheduler = self._scheduler
        slots = scheduler.limits.num_request_slots
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_blocks_used=scheduler.blocks.num_used,
            kv_blocks_total=scheduler.blocks.num_blocks,
            request_slots_used=slots - scheduler.num_free_slots,
            request_slots_total=slots,
            num_preemptions=self._num_preemptions,
        )


def _failure(request: GenerationRequest, error: Exception) -> RequestOutput:
    return RequestOutput(request.request_id, finish_reason=FinishReason.ERROR, error=error)
