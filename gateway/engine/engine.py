"""The engine: one thread that turns requests into tokens, step by step.

    take commands -> schedule and send the next step -> wait for the oldest -> commit -> publish

While the attention worker computes a step the next one is on its way, so that it never waits for
the gateway. Owner of scheduler, block tables and output streams: the engine thread. Other threads
reach it through the inbox only; outputs go to the event loop, in one call per turn. The thread
blocks on the inbox while there is nothing to do.

What can go wrong: an abandoned step (experts missing) is scheduled again on a newer expert map, and
ends its requests after the hold time; of one that takes expert workers down the request that does
it is found, and ends; a failed step ends the requests in it; a lost or hung attention worker is
restarted, and its requests are computed again from their tokens.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Collection, Iterable

from expertmesh.errors import (
    DeadlineError,
    EngineError,
    OverloadedError,
    PeerError,
    RequestError,
    StartupError,
    StoppingError,
)
from expertmesh.settings import EngineSettings
from expertmesh.v1 import attention_service_pb2 as pb
from gateway.attention.port import AttentionPort
from gateway.engine.caution import Caution
from gateway.engine.deadlines import Deadlines
from gateway.engine.engine_load import EngineCounters, engine_stats, queue_load
from gateway.engine.engine_observer import EngineObserver
from gateway.engine.expert_hold import ExpertHold
from gateway.engine.inbox import Commands, Inbox, QueueLimits
from gateway.engine.inquiry import Inquiry, InquiryTurn
from gateway.engine.output_desk import OutputDesk
from gateway.engine.request_state import RequestState, ScheduledStep
from gateway.engine.scheduler import Scheduler
from gateway.engine.scheduler_limits import SchedulerLimits, SchedulerPolicy
from gateway.engine.step_messages import slot_errors, tokens_by_slot
from gateway.engine.step_pipeline import StepPipeline
from gateway.engine.step_results import check_result
from gateway.sequence import EngineStats, GenerationRequest
from gateway.text.tokenizer import Tokenizer

logger = logging.getLogger("gateway.engine")

ATTENTION_HOLD_S = 30.0
"""Longest time that queued requests wait for an attention worker to come back."""
MAX_FAILURES = 3
"""Failed steps in a row after which the attention worker is restarted."""
MAX_LOSSES = 3
"""Lives of an attention worker that a request may have been part of the end of."""


class Engine:
    """Generates tokens for requests. Public methods may be called from any thread.

    Args:
        attention: An attention worker that is up.
        settings: Limits and times.
        loop: Event loop whose thread calls the sinks.
        tokenizer: For text and stop strings; None without one.
        eos_token_ids: Tokens that end an output.
        observer: Told about requests and steps.
        turn: Shared with other engines that use the same expert workers.
        name: Of its thread.

    Attributes:
        num_lives: Attention workers so far: with each the KV cache starts empty.

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
        turn: InquiryTurn | None = None,
        name: str = "engine",
    ) -> None:
        limits = attention.limits()
        if limits is None:
            raise StartupError("the attention worker ended right after its start")
        self._attention = attention
        self._observer = observer or EngineObserver()
        self._limits = limits
        self._policy = SchedulerPolicy.of(settings)
        self._scheduler = Scheduler(limits, self._policy)
        # Drafts are for the token after the last one, which must be known when they are scheduled.
        depth = 2 if settings.async_scheduling and not settings.num_speculative_tokens else 1
        self._pipeline = StepPipeline(attention, depth, settings.step_timeout_s, eos_token_ids)
        self._outputs = OutputDesk(loop, tokenizer, eos_token_ids, self._observer)
        self._deadlines = Deadlines(settings.request_timeout_s)
        hold = ExpertHold(settings.experts_hold_s)
        inquiry = Inquiry(turn or InquiryTurn())
        self._caution = Caution(hold, inquiry, self._observer)
        self._down_since_s: float | None = None
        self._num_failures = 0
        self.num_lives = 1
        self._counters = EngineCounters()
        queue = QueueLimits(settings.max_num_queued_reqs, settings.max_num_queued_tokens)
        self._inbox = Inbox(queue, queue_load(self._scheduler))
        self._stats = engine_stats(self._scheduler, self._counters)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        attention.subscribe(self._inbox.poke)

    # ---- any thread ----

    def start(self) -> None:
        """Starts the engine thread."""
        self._thread.start()

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request; its outputs go to its sink, the last one with a finish reason.

        Raises:
            OverloadedError: Too much waits, or the attention worker stays away.
            RequestError: It can never fit, or its id is in use.
        """
        self._limits.check_fits(len(request.prompt_token_ids))
        down_since_s = self._down_since_s
        if down_since_s is not None and time.monotonic() - down_since_s >= ATTENTION_HOLD_S:
            raise OverloadedError("the attention worker is down", retry_after_s=5.0)
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
        num_waiting, alive = self._inbox.num_waiting, self._thread.is_alive()
        return dataclasses.replace(self._stats, num_waiting=num_waiting, alive=alive)

    @property
    def ready(self) -> bool:
        """False while the attention worker is down, and after the end."""
        return self._down_since_s is None and self._thread.is_alive()

    @property
    def limits(self) -> SchedulerLimits:
        """What the attention worker has room for."""
        return self._limits

    def tell_to_stop(self) -> None:
        """Takes no further request and asks the thread to end."""
        self._inbox.stop()

    def stop(self, timeout_s: float) -> bool:
        """Ends all requests with an error, and the thread after the step in flight.

        Returns:
            False if it has not ended in time: the step hangs until its attention worker is stopped.
        """
        self.tell_to_stop()
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
        self._end(self._scheduler.states, StoppingError())
        self._publish()

    def _turn(self) -> bool:
        commands = self._inbox.take(self._patience_s(time.monotonic()))
        self._obey(commands)
        if commands.stop:
            return False
        now_s = time.monotonic()
        self._look_after_attention()
        self._end_overdue(now_s)
        try:
            self._send_steps(now_s)
            if self._pipeline.busy:
                self._receive_step()
        except PeerError as error:
            self._lose_attention(str(error))
        self._publish()
        return True

    def _patience_s(self, now_s: float) -> float | None:
        """How long to wait for commands; None if only a command can make work."""
        if self._pipeline.busy:
            return 0.0
        if not self._scheduler.has_work:
            return None
        wait_s = self._caution.wait_s(now_s)
        if self._down_since_s is not None:
            wait_s = max(0.0, self._down_since_s + ATTENTION_HOLD_S - now_s)
        return min(wait_s, self._deadlines.wait_s(now_s))

    def _obey(self, commands: Commands) -> None:
        for request in commands.requests:
            self._add(request)
        for request_id in commands.cancelled:
            state = self._scheduler.get(request_id)
            if state is not None:
                self._end([state], None)
        if commands.map_changed:
            self._caution.retry_now()
        if not self._scheduler.has_work:
            self._caution.end()

    def _add(self, request: GenerationRequest) -> None:
        try:
            state = self._scheduler.add(request)
        except RequestError as error:  # limits changed since it was checked at the door
            self._outputs.refuse(request, error)
            self._inbox.forget(request.request_id)
            return
        self._deadlines.add(request)
        self._outputs.open(state)

    def _end_overdue(self, now_s: float) -> None:
        for request_id in self._deadlines.overdue(now_s):
            if (state := self._scheduler.get(request_id)) is not None:
                after_s = now_s - state.request.arrival_s
                self._end([state], DeadlineError(f"the request was not done after {after_s:.3g} s"))

    def _send_steps(self, now_s: float) -> None:
        """Keeps the attention worker busy: the next step is there when it is done with one."""
        while self._may_send(now_s):
            if self._caution.active:
                step = self._caution.schedule(self._scheduler)
            else:
                step = self._scheduler.schedule()
            if step is None:
                assert self._pipeline.busy, f"no step for {len(self._scheduler.states)} requests"
                return
            self._tell_scheduled(step)
            self._pipeline.send(step)

    def _may_send(self, now_s: float) -> bool:
        if self._down_since_s is not None or not self._scheduler.has_work:
            return False
        if self._caution.active:
            return not self._pipeline.busy and self._caution.wait_s(now_s) <= 0
        return not self._pipeline.full

    def _receive_step(self) -> None:
        flight = self._pipeline.receive()
        step, response = flight.step, flight.response
        check_result(step, response)
        if response.status == pb.StepResponse.STATUS_DONE:
            self._commit(step, response)
            return
        self._pipeline.abandon(self._scheduler)
        if response.status == pb.StepResponse.STATUS_FAILED:
            self._fail(step, response.message or "no reason was given")
            return
        self._scheduler.rewind(step)
        self._end(*self._caution.abandoned(step, response, time.monotonic()))

    def _tell_scheduled(self, step: ScheduledStep) -> None:
        self._tell_load()
        for state in step.admitted:
            self._outputs.of(state).started()
        for state in step.preempted:
            logger.info("preempted request %s: KV blocks ran out", state.request_id)
            self._counters.num_preemptions += 1
            self._observer.request_preempted(state.request)

    def _commit(self, step: ScheduledStep, response: pb.StepResponse) -> None:
        current = {entry.slot: entry.state for entry in step.entries if entry.current}
        errors = slot_errors(response)
        self._outputs.keep_records(current, response)
        damaged = {*response.nonfinite_slots, *response.degraded_slots}
        tokens = tokens_by_slot(response)
        silent = self._scheduler.commit(
            step,
            {slot: [token.token_id for token in new] for slot, new in tokens.items()},
            {draft.slot: draft.num_drafts for draft in response.drafts},
        )
        for slot in current.keys() & damaged:
            self._scheduler.distrust(current[slot])
        for slot in tokens.keys() & (current.keys() - errors.keys()):
            if self._outputs.push(current[slot], tokens[slot], self._limits.max_model_len):
                self._forget(current[slot])
        for slot in errors.keys() & current.keys():
            self._end([current[slot]], errors[slot])
        mute = [state for state in silent if state.slot is not None]
        self._end(mute, EngineError("the attention worker returned no token"))
        self._num_failures = 0
        if self._caution.active:
            self._caution.computed(time.monotonic())
        self._counters.add(response)
        self._observer.step_done(
            step.num_tokens, response.duration_us / 1e6, response.expert_wait_us / 1e6
        )

    def _fail(self, step: ScheduledStep, message: str) -> None:
        names = ", ".join(state.request_id for state in step.current_states)
        logger.error("step %d failed with requests %s: %s", step.step, names, message)
        self._observer.engine_failed(message)
        self._end(step.current_states, EngineError(f"step failed: {message}"))
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            self._lose_attention(f"{self._num_failures} steps failed in a row")

    def _look_after_attention(self) -> None:
        limits = self._attention.limits()
        if self._down_since_s is None:
            if limits is None:
                self._lose_attention("attention worker ended")
            return
        down_s = time.monotonic() - self._down_since_s
        if limits is not None:
            return self._welcome_attention(limits, down_s)
        self._attention.restart("attention worker ended")  # it may have ended again unnoticed
        if down_s >= ATTENTION_HOLD_S:
            down = OverloadedError("the attention worker is down", retry_after_s=5.0)
            self._end(self._scheduler.states, down)

    def _welcome_attention(self, limits: SchedulerLimits, down_s: float) -> None:
        self._limits = limits
        self.num_lives += 1
        lost = self._scheduler.reset(limits)
        self._end(lost, EngineError("the attention worker came back with less room"))
        self._down_since_s = None
        waiting = len(self._scheduler.waiting)
        logger.info("attention worker is back after %.1f s; %d requests", down_s, waiting)

    def _lose_attention(self, reason: str) -> None:
        """The running requests wait and will be computed again, except those that may be why."""
        running = list(self._scheduler.running)
        logger.error("lost the attention worker, holding %d requests: %s", len(running), reason)
        self._observer.engine_failed(reason)
        self._down_since_s = time.monotonic()
        self._num_failures = 0
        self._caution.end()
        self._pipeline.clear()
        for state in running:
            state.num_losses += 1
        suspects = [state for state in running if state.num_losses >= MAX_LOSSES]
        self._end(suspects, EngineError(f"the attention worker was lost {MAX_LOSSES} times"))
        self._scheduler.requeue()
        self._attention.restart(reason)

    def _recover(self, error: Exception) -> None:
        """After a mistake of ours nothing is trusted: all requests end, everything starts over."""
        for request in self._outputs.clear():
            self._outputs.refuse(request, EngineError(f"{error!r}"))
            self._deadlines.forget(request.request_id)
            self._inbox.forget(request.request_id)
        self._scheduler = Scheduler(self._limits, self._policy)
        self._lose_attention("internal error")
        self._publish()

    def _end(self, states: Iterable[RequestState], error: Exception | None) -> None:
        """Ends requests with an error, or as aborted without one."""
        for state in states:
            self._outputs.end(state, error)
            self._forget(state)

    def _forget(self, state: RequestState) -> None:
        self._scheduler.finish(state.request_id)
        self._deadlines.forget(state.request_id)
        self._inbox.forget(state.request_id)

    def _publish(self) -> None:
        """Tells the world about a turn: load and outputs."""
        self._tell_load()
        self._outputs.publish()

    def _tell_load(self) -> None:
        self._inbox.update_load(queue_load(self._scheduler))
        self._stats = engine_stats(self._scheduler, self._counters)
