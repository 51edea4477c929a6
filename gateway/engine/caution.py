"""What the engine does while something is wrong with expert workers: one step at a time.

Either experts are missing and requests are held, or expert workers were lost with the same rows and
there is an inquiry; or both, as an inquiry costs expert workers. Owner: the engine thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from expertmesh.errors import QuarantineError
from expertmesh.v1 import attention_service_pb2 as pb
from gateway.engine.engine_observer import EngineObserver
from gateway.engine.expert_hold import ExpertHold, unavailable_error
from gateway.engine.inquiry import Inquiry
from gateway.engine.request_state import RequestState, ScheduledStep
from gateway.engine.scheduler import Scheduler

logger = logging.getLogger("gateway.engine")


class Verdict(NamedTuple):
    """Requests that end, and why."""

    states: Sequence[RequestState] = ()
    error: Exception | None = None


class Caution:
    """Whether there is reason for it, and what is computed then.

    Args:
        hold: Of requests whose experts are missing.
        inquiry: Into requests that may take expert workers down.
        observer: Told about steps that were abandoned, and what came of them.
    """

    def __init__(self, hold: ExpertHold, inquiry: Inquiry, observer: EngineObserver) -> None:
        self._hold, self._inquiry, self._observer = hold, inquiry, observer
        self.active = False
        """True if the next step is sent only when none is in flight, and `wait_s` is 0."""

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next step may be sent."""
        return max(self._hold.wait_s(now_s), self._inquiry.wait_s(now_s))

    def retry_now(self) -> None:
        """There is a newer expert map."""
        self._hold.retry_now()

    def schedule(self, scheduler: Scheduler) -> ScheduledStep | None:
        """The next step: of suspects alone, if there are any; else nobody is admitted who would be
        held."""
        while suspects := self._inquiry.next_suspects():
            step = scheduler.schedule_only(suspects)
            if step is not None:
                return step
            self._inquiry.clear_next()
        self._look()
        held = self._hold.active and bool(scheduler.running)
        return scheduler.schedule(admit=not held)

    def computed(self, now_s: float) -> None:
        """A step was committed."""
        if self._hold.active:
            logger.info("experts are back after %.1f s", self._hold.held_s(now_s))
            self._hold.clear()
        if self._inquiry.active:
            self._inquiry.clear_next()
        self._look()

    def abandoned(self, step: ScheduledStep, response: pb.StepResponse, now_s: float) -> Verdict:
        """A step was abandoned: experts are missing, or expert workers were lost with its rows.

        Args:
            step: The step; it was rewound.
            response: What became of it.
            now_s: On the monotonic clock.
        """
        is_lethal = response.status == pb.StepResponse.STATUS_LETHAL
        verdict = (self._lost if is_lethal else self._paused)(step, response, now_s)
        self._look()
        return verdict

    def _paused(self, step: ScheduledStep, response: pb.StepResponse, now_s: float) -> Verdict:
        missing = tuple((expert.layer, expert.expert) for expert in response.missing)
        error = unavailable_error(missing, response.message)
        self._observer.step_paused(missing)
        if not self._hold.active:
            logger.warning("holding %d requests: %s", len(step.entries), error)
        self._hold.pause(now_s)
        if not self._hold.expired(now_s):
            return Verdict()
        logger.error("ending %d requests: %s", len(step.entries), error)
        return Verdict(step.current_states, error)

    def _lost(self, step: ScheduledStep, response: pb.StepResponse, now_s: float) -> Verdict:
        layer, slots = response.lethal_layer, frozenset(response.suspect_slots)
        suspects = [state for state in step.current_states if state.slot in slots]
        self._observer.step_lethal(layer)
        names = ", ".join(state.request_id for state in suspects)
        logger.error("step %d: suspecting %s: %s", step.step, names, response.message)
        guilty = self._inquiry.lost(suspects, layer, now_s)
        if guilty is None:
            return Verdict()
        self._observer.request_quarantined(guilty.request, layer)
        logger.error(
            "quarantined request %s: an expert worker was lost with rows of nobody else, in layer "
            "%d as others before",
            guilty.request_id,
            layer,
        )
        return Verdict([guilty], QuarantineError(layer))

    def end(self) -> None:
        """Nothing is left to be cautious about."""
        self._hold.clear()
        self._inquiry.end()
        self.active = False

    def _look(self) -> None:
        self.active = self._hold.active or self._inquiry.active
