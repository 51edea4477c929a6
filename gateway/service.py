"""The one way in for every API: checks that requests can be served, submits them, streams outputs.

Everything here runs in the thread of the event loop; sinks are called there as well. Whoever opens
a stream closes it, and closing cancels what still runs, so a client that goes away frees its KV
blocks and its request slot.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from expertmesh import __version__
from expertmesh.deep_stack import DeepStackPool
from expertmesh.errors import EngineError, ExpertUnavailableError, RequestError, StoppingError
from expertmesh.model_config import ModelConfig
from expertmesh.placement import missing_pairs
from gateway.generation_options import ModelBounds
from gateway.mesh.mesh_status import MeshStatus
from gateway.sampling_defaults import SamplingDefaults
from gateway.sequence import (
    EnginePort,
    EngineStats,
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SamplingParams,
    Sink,
)
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from gateway.tools.tool_format import ToolFormat

P = ParamSpec("P")
T = TypeVar("T")

_MAX_PENDING = 64
"""Outputs kept apart for a slow reader; more are merged into one."""


@dataclass(frozen=True)
class ServedModel:
    """The model behind the API."""

    name: str
    config: ModelConfig
    max_model_len: int
    """Most tokens of prompt and output together."""
    dtype: str
    """Type of computation, e.g. "bfloat16"."""
    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate | None = None
    fingerprint: str = ""
    """Hash of the checkpoint, hexadecimal; part of `system_fingerprint`."""
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    """For requests that leave sampling open."""
    name_required: bool = False
    """Requests must name the model."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time."""

    @cached_property
    def bounds(self) -> ModelBounds:
        """What the model allows in a request."""
        return ModelBounds(self.config.vocab_size, self.max_model_len, self.tokenizer)

    @cached_property
    def tool_format(self) -> ToolFormat:
        """How the model is told of tools and calls them."""
        return ToolFormat(self.chat_template)

    @cached_property
    def system_fingerprint(self) -> str:
        """Changes if the server may answer the same request differently."""
        return "-".join(filter(None, ("expertmesh", __version__, self.fingerprint[:8])))


@dataclass(frozen=True)
class ApiLimits:
    """Bounds of the public APIs."""

    max_body_bytes: int = 10 * 2**20
    """A longer request is refused without reading it."""
    max_prompts: int = 1024
    """Prompts of one call; no more than the queue takes at its best."""
    max_prompt_tokens: int = 262_144
    """Tokens of all prompts of a call that has several; the queue never takes more at once."""
    max_json_depth: int = 32
    max_json_nodes: int = 250_000
    """Values in one request."""
    header_timeout_s: float = 10.0
    """From the connection to the end of the first request's header."""
    body_timeout_s: float = 30.0
    """From the header of a request to the end of its body."""
    idle_timeout_s: float = 75.0
    """A kept connection without a complete header; longer than the usual 60 s of load balancers."""
    write_timeout_s: float = 60.0
    """A stream whose reader takes nothing for this long is cut."""
    keep_alive_s: float = 5.0
    """Between comments on a stream that has nothing to say, as while experts are missing."""
    request_timeout_s: float = 3600.0
    """From the arrival of a request to its end; clients may ask for less."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a call, ready for the engine."""

    request_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    """Lower goes first."""
    cache_salt: str = ""
    """Prefixes are shared only between prompts with the same salt."""
    timeout_s: float | None = None
    """Seconds that the request may take; never more than the server's own limit."""
    call_id: str = ""
    """Of the call, as its client knows it; for the log."""


def new_id(prefix: str) -> str:
    """A fresh id, e.g. "cmpl-6f0c..."; not guessable."""
    return f"{prefix}{secrets.token_hex(16)}"


class GenerationFrontend:
    """Takes validated prompts and gives streams of outputs.

    Args:
        engine: Where tokens come from.
        model: What is served.
        mesh: Gives the state of the expert workers right now; from any thread.
        limits: Bounds of the APIs.
    """

    def __init__(
        self,
        engine: EnginePort,
        model: ServedModel,
        mesh: Callable[[], MeshStatus],
        limits: ApiLimits | None = None,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.limits = limits or ApiLimits()
        self._stopped_s = math.inf
        self._engine = engine
        self._active: dict[str, tuple[GenerationStream, int]] = {}
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._grammar_pool = DeepStackPool(max_workers=1, thread_name_prefix="compile")

    def close(self) -> None:
        """Refuses new clients and ends the helper threads; running streams go on."""
        self.stop_accepting()
        for pool in (self._pool, self._grammar_pool):
            pool.shutdown(wait=True, cancel_futures=True)

    @property
    def accepting(self) -> bool:
        """False once the gateway is about to stop."""
        return self._stopped_s == math.inf

    def stop_accepting(self) -> None:
        """Refuses new clients from now on, as the gateway is about to stop."""
        self._stopped_s = min(self._stopped_s, time.monotonic())

    def stats(self) -> EngineStats:
        """Load of the engine."""
        return self._engine.stats()

    @property
    def alive(self) -> bool:
        """False once only a restart can help."""
        return self._engine.stats().alive

    @property
    def ready(self) -> bool:
        """True if a request that comes now can be served."""
        return self.accepting and self.alive and self.mesh().ready

    def check_available(self, connected_s: float = math.inf) -> None:
        """Refuses work that cannot be done.

        Args:
            connected_s: When the client connected, on the monotonic clock; just now by default.
                Who did so before the gateway was stopped could not know of that, and is served
                while the gateway lives.

        Raises:
            StoppingError: The gateway is stopping.
            ExpertUnavailableError: An expert has no usable copy.
        """
        if connected_s > self._stopped_s:
            raise StoppingError()
        mesh = self.mesh()
        if mesh.uncovered and not mesh.ready:
            raise ExpertUnavailableError(missing_pairs(dict(mesh.uncovered)))

    def open(self, prompts: Sequence[Prompt], *, connected_s: float = math.inf) -> GenerationStream:
        """Submits the prompts of one call, all or none.

        Args:
            prompts: Each is a request of its own in the engine.
            connected_s: See `check_available`.

        Raises:
            OverloadedError: A queue is full, or the gateway is stopping.
            ExpertUnavailableError: An expert has no usable copy.
            RequestError: A request id is in use.
        """
        self.check_available(connected_s)
        stream = GenerationStream(self, [prompt.request_id for prompt in prompts])
        try:
            for index, prompt in enumerate(prompts):
                self._submit(prompt, stream, index)
        except BaseException:
            stream.close()
            raise
        return stream

    def _submit(self, prompt: Prompt, stream: GenerationStream, index: int) -> None:
        if prompt.request_id in self._active:
            raise RequestError(
                "request_id names a request that is running",
                param="request_id",
                code="request_id_in_use",
            )
        self._active[prompt.request_id] = (stream, index)
        stream.running.add(index)
        try:
            self._engine.submit(self._request(prompt, stream.sink(index)))
        except BaseException:
            stream.running.discard(index)
            del self._active[prompt.request_id]
            raise

    def _request(self, prompt: Prompt, sink: Sink) -> GenerationRequest:
        now_s = time.monotonic()
        most_s = self.limits.request_timeout_s
        return GenerationRequest(
            request_id=prompt.request_id,
            prompt_token_ids=prompt.token_ids,
            params=prompt.params,
            sink=sink,
            arrival_s=now_s,
            priority=prompt.priority,
            deadline_s=now_s
            + (most_s if prompt.timeout_s is None else min(prompt.timeout_s, most_s)),
            cache_salt=prompt.cache_salt,
            call_id=prompt.call_id,
        )

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one prompt; the last one has a finish reason.

        Cancels the request in the engine when the iteration ends early. Raises as `open` does, and
        the engine's error if the request fails.
        """
        with self.open([Prompt(request_id, tuple(prompt_token_ids), params)]) as stream:
            while not stream.done:
                for _, output in await stream.next() or ():
                    yield output

    def abort(self, request_id: str) -> bool:
        """Ends a running request; False if there is none with this id."""
        if request_id not in self._active:
            return False
        stream, index = self._active[request_id]
        self._engine.cancel(request_id)
        stream.push(index, RequestOutput(request_id, finish_reason=FinishReason.ABORT))
        return True

    def release(self, request_ids: Iterable[str], *, cancel: bool) -> None:
        """Forgets requests of a stream that ended; cancels those that still run."""
        for request_id in request_ids:
            if self._active.pop(request_id, None) is not None and cancel:
                self._engine.cancel(request_id)

    async def run_in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs work that would block the event loop for long, such as encoding a long text."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))

    async def run_in_grammar_thread(
        self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs work that may take seconds and recurse deeply, apart from all other work."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._grammar_pool, lambda: function(*args, **kwargs))


class GenerationStream:
    """Outputs of the prompts of one call, as they come. A context manager: leaving it cancels.

    A reader that is slow gets fewer and larger outputs; what is kept for it is bounded by the
    tokens that the requests may generate.
    """

    def __init__(self, frontend: GenerationFrontend, request_ids: Sequence[str]) -> None:
        self._frontend = frontend
        self._request_ids = tuple(request_ids)
        self.running: set[int] = set()
        """Prompts that the engine has and that have not ended."""
        self._pending: dict[int, list[RequestOutput]] = {}
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels the requests that still run."""
        running = [self._request_ids[index] for index in self.running]
        self.running.clear()
        self._frontend.release(running, cancel=True)

    @property
    def done(self) -> bool:
        """True once every output was returned."""
        return not self.running and not self._pending and self._error is None

    def sink(self, index: int) -> Sink:
        """Takes the outputs of a prompt."""
        return lambda output: self.push(index, output)

    def push(self, index: int, output: RequestOutput) -> None:
        """Adds an output of a prompt; those of an ended prompt are dropped."""
        if index not in self.running:
            return
        if output.finish_reason is not None:
            self.running.discard(index)
            self._frontend.release([self._request_ids[index]], cancel=False)
        if output.finish_reason is FinishReason.ERROR:
            self._error = output.error or EngineError("the request failed")
            output = replace(output, finish_reason=None, error=None)
        self._wake.set()
        if output.finish_reason is None and not output.token_ids and not output.text:
            return
        queue = self._pending.setdefault(index, [])
        queue.append(output)
        if len(queue) > _MAX_PENDING:
            self._pending[index] = [merge(queue)]

    async def next(self, timeout_s: float | None = None) -> list[tuple[int, RequestOutput]] | None:
        """What came since the last call, one output per prompt; waits until there is something.

        Returns:
            (index of the prompt, output) pairs, or None if nothing came within the timeout.

        Raises:
            Exception: A request failed; the others should be cancelled.
        """
        if not self._pending and self._error is None and self.running:
            self._wake.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                return None
        if not self._pending and self._error is not None:
            error, self._error = self._error, None
            raise error
        pending, self._pending = self._pending, {}
        return [(index, merge(outputs)) for index, outputs in pending.items()]


def merge(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Outputs of one request in sequence, as one."""
    if len(outputs) == 1:
        return outputs[0]
    last = outputs[-1]
    prompt_logprobs = (output.prompt_logprobs for output in outputs)
    return replace(
        last,
        token_ids=tuple(chain.from_iterable(output.token_ids for output in outputs)),
        text="".join(output.text for output in outputs),
        logprobs=tuple(chain.from_iterable(output.logprobs for output in outputs)),
        prompt_logprobs=next((found for found in prompt_logprobs if found is not None), None),
    )
