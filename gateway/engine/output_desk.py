"""The outputs of all requests of an engine: made here, handed to the event loop once a turn.

Owner: the engine thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from expertmesh.v1 import attention_service_pb2 as pb
from gateway.engine.engine_observer import EngineObserver
from gateway.engine.outbox import Outbox
from gateway.engine.output_stream import NewToken, OutputStream
from gateway.engine.request_state import RequestState
from gateway.sequence import FinishReason, GenerationRequest, RequestOutput
from gateway.text.tokenizer import Tokenizer


class OutputDesk:
    """Streams of outputs.

    Args:
        loop: Event loop whose thread calls the sinks.
        tokenizer: For text and stop strings; None without one.
        eos_token_ids: Tokens that end an output.
        observer: Told about tokens and ends.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        tokenizer: Tokenizer | None,
        eos_token_ids: Collection[int],
        observer: EngineObserver,
    ) -> None:
        self._outbox = Outbox(loop)
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._observer = observer
        self._streams: dict[str, OutputStream] = {}

    def open(self, state: RequestState) -> None:
        """Starts the outputs of a request."""
        self._streams[state.request_id] = OutputStream(
            state, self._tokenizer, self._eos_token_ids, self._observer
        )

    def of(self, state: RequestState) -> OutputStream:
        """Outputs of a request that has not ended."""
        return self._streams[state.request_id]

    def keep_records(self, states: Mapping[int, RequestState], response: pb.StepResponse) -> None:
        """Keeps what a step tells about tokens besides their ids.

        Args:
            states: Request slot to request, of those that the step still concerns.
            response: Result of the step.
        """
        for slot in response.degraded_slots:
            if slot in states:
                self.of(states[slot]).is_degraded = True
        for logprobs in response.prompt_logprobs:
            if logprobs.slot in states:
                self.of(states[logprobs.slot]).prompt_logprobs.add(logprobs)
        for experts in response.routed_experts:
            if experts.slot in states:
                self.of(states[experts.slot]).routed_experts.add(experts)

    def push(self, state: RequestState, tokens: Sequence[NewToken], max_model_len: int) -> bool:
        """Tells about new tokens; True if they ended the request."""
        output = self.of(state).push(tokens, max_model_len)
        self._outbox.add(state.request.sink, output)
        ended = output.finish_reason is not None
        if ended:
            del self._streams[state.request_id]
        return ended

    def end(self, state: RequestState, error: Exception | None) -> None:
        """Ends a request with an error, or as aborted without one."""
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        output = self._streams.pop(state.request_id).end(reason, error)
        self._outbox.add(state.request.sink, output)

    def refuse(self, request: GenerationRequest, error: Exception) -> None:
        """Answers a request that was never opened, or whose stream is not to be trusted."""
        output = RequestOutput(request.request_id, finish_reason=FinishReason.ERROR, error=error)
        self._outbox.add(request.sink, output)

    def clear(self) -> list[GenerationRequest]:
        """Forgets all streams without a word; returns their requests."""
        requests = [stream.request for stream in self._streams.values()]
        self._streams = {}
        return requests

    def publish(self) -> None:
        """Hands the outputs of a turn to the event loop."""
        self._outbox.publish()
