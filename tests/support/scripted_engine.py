"""An engine for tests of the APIs: it says what the test tells it to say, in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from aiohttp import web
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from expertmesh.model_config import (
    DenseFfnConfig,
    GateConfig,
    GqaConfig,
    LayerConfig,
    ModelConfig,
    MoeFfnConfig,
    NormConfig,
    RopeConfig,
)
from gateway.app import Access, build_app
from gateway.descriptor_shares import DescriptorShares
from gateway.engine.engine_observer import EngineObserver
from gateway.engine.output_stream import NewToken, OutputStream
from gateway.engine.request_state import RequestState
from gateway.http_connections import make_runner
from gateway.listen import bind
from gateway.mesh.mesh_status import MeshStatus
from gateway.placement.operator import Operator, StaticPlacement
from gateway.reception import Reception
from gateway.request_metrics import RequestMetrics
from gateway.sequence import (
    EngineStats,
    FinishReason,
    GenerationRequest,
    RequestOutput,
    TokenLogprobs,
)
from gateway.service import ApiLimits, GenerationFrontend, ServedModel
from gateway.telemetry.telemetry import Telemetry
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer

VOCAB_SIZE = 320
CONTEXT = 512
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}"
)


def byte_tokenizer() -> Tokenizer:
    """A token per byte, and ChatML's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer(raw.to_str(), {"eos_token": "<|im_end|>"})


def tiny_config() -> ModelConfig:
    """Two layers, one of them with experts; only its numbers are used."""
    attention = GqaConfig(2, 1, 4, RopeConfig(1e4, 4), scale=0.5)
    dense = LayerConfig(attention, DenseFfnConfig(intermediate_size=8))
    moe = LayerConfig(attention, MoeFfnConfig(GateConfig(8, 2), intermediate_size=8))
    return ModelConfig(
        family="mixtral",
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        layers=(dense, moe),
        norm=NormConfig(1e-5),
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def served_model(*, tokenizer: bool = True, name_required: bool = False) -> ServedModel:
    """The model of the tests, named "tiny"."""
    found = byte_tokenizer() if tokenizer else None
    return ServedModel(
        name="tiny",
        config=tiny_config(),
        max_model_len=CONTEXT,
        dtype="bfloat16",
        tokenizer=found,
        chat_template=ChatTemplate(CHATML, found) if found else None,
        fingerprint="0123456789abcdef",
        name_required=name_required,
    )


@dataclass
class ScriptedEngine:
    """Answers each request with `answer`, a token per turn of the event loop.

    With `manual` set nothing comes by itself: the test calls `emit`.
    """

    tokenizer: Tokenizer | None
    answer: str = "Hi there"
    manual: bool = False
    num_cached: int = 0
    """Prompt tokens that it finds in its cache."""
    refuse: Exception | None = None
    """Raised by submit."""
    refuse_from: int = 0
    """The first so many requests are taken nevertheless."""
    context: int = CONTEXT
    """Most tokens of prompt and output together."""
    requests: list[GenerationRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    load: EngineStats = field(default_factory=EngineStats)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with every request and every cancellation; the test clears it."""

    def submit(self, request: GenerationRequest) -> None:
        """Takes a request."""
        if self.refuse is not None and len(self.requests) >= self.refuse_from:
            raise self.refuse
        self.requests.append(request)
        self.changed.set()
        if not self.manual:
            self._speak(request, list(self.outputs(request)))

    def cancel(self, request_id: str) -> None:
        """Notes the cancellation."""
        self.cancelled.append(request_id)
        self.changed.set()

    def stats(self) -> EngineStats:
        """What the test says."""
        return self.load

    def emit(self, text: str = "", *, index: int = -1, **fields: object) -> None:
        """Sends an output for a request: by default for the latest one, with its tokens."""
        request = self.requests[index]
        ids = tuple(self.tokenizer.encode(text)) if self.tokenizer else ()
        output = RequestOutput(request.request_id, token_ids=ids, text=text)
        request.sink(replace(output, **fields))  # type: ignore[arg-type]

    def outputs(self, request: GenerationRequest) -> Sequence[RequestOutput]:
        """The whole answer to a request, read as the engine reads what it samples."""
        ids = self.tokenizer.encode(self.answer) if self.tokenizer else [5, 6, 7]
        state = RequestState(request)
        stream = OutputStream(state, self.tokenizer, (), EngineObserver())
        found: list[RequestOutput] = []
        for token_id in ids:
            state.token_ids.append(token_id)
            logprobs = _logprobs(token_id, request.params.num_logprobs)
            output = stream.push([NewToken(token_id, logprobs)], self.context)
            found.append(replace(output, num_cached_tokens=self.num_cached))
            if output.finish_reason is not None:
                break
        if found[-1].finish_reason is None:
            end = stream.end(FinishReason.STOP)
            text = found[-1].text + end.text
            found[-1] = replace(found[-1], text=text, finish_reason=end.finish_reason)
        found[0] = replace(found[0], prompt_logprobs=_prompt_logprobs(request))
        found[-1] = replace(found[-1], routed_experts=_routed_experts(state))
        return found

    def _speak(self, request: GenerationRequest, outputs: list[RequestOutput]) -> None:
        if not outputs or request.request_id in self.cancelled:
            return
        loop = asyncio.get_running_loop()
        loop.call_soon(request.sink, outputs[0])
        loop.call_soon(self._speak, request, outputs[1:])

    async def wait_for(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Waits until a request or a cancellation makes the condition true."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


def _logprobs(token_id: int, num: int | None) -> TokenLogprobs | None:
    if num is None:
        return None
    top = tuple((token_id + i, -0.25 * (i + 1)) for i in range(num))
    return TokenLogprobs(token_id, -0.25, top)


def _prompt_logprobs(request: GenerationRequest) -> tuple[TokenLogprobs | None, ...] | None:
    num = request.params.num_prompt_logprobs
    if num is None:
        return None
    return (None, *(_logprobs(token_id, num) for token_id in request.prompt_token_ids[1:]))


def _routed_experts(state: RequestState) -> npt.NDArray[np.uint16] | None:
    """One MoE layer; the experts of the token at position p are p % 8 and (p + 1) % 8."""
    if not state.request.params.return_routed_experts:
        return None
    positions = np.arange(len(state.token_ids) - 1)
    experts = np.stack([positions % 8, (positions + 1) % 8], axis=-1)
    return experts[:, None, :].astype(np.uint16)


@dataclass
class Gateway:
    """An HTTP server in this process over a scripted engine."""

    engine: ScriptedEngine
    frontend: GenerationFrontend
    metrics: RequestMetrics
    mesh: MeshStatus
    port: int = 0
    runner: web.AppRunner = field(init=False)

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def scripted_gateway(
    *,
    tokenizer: bool = True,
    limits: ApiLimits | None = None,
    mesh: MeshStatus | None = None,
    add_routes: Callable[[web.Application], None] | None = None,
    model: ServedModel | None = None,
    access: Access | None = None,
    operator: Operator | None = None,
    telemetry: Telemetry | None = None,
    shares: Callable[[], DescriptorShares] = DescriptorShares.now,
) -> AsyncIterator[Gateway]:
    """Starts the server on a free port and stops it."""
    model = model or served_model(tokenizer=tokenizer)
    engine = ScriptedEngine(model.tokenizer, context=model.max_model_len)
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, model.name)
    limits = limits or ApiLimits()
    gateway = Gateway(
        engine,
        GenerationFrontend(engine, model, lambda: gateway.mesh, limits),
        metrics,
        mesh or MeshStatus(epoch=1),
    )
    metrics.watch(engine.stats, gateway.frontend.mesh)
    settings = {"http": {"port": 1}}
    app = build_app(
        gateway.frontend,
        registry,
        access=access or Access(),
        settings=settings,
        operator=operator or StaticPlacement(),
        telemetry=telemetry,
    )
    if add_routes is not None:
        add_routes(app)
    runner = gateway.runner = make_runner(app, limits, stop_s=1.0)
    await runner.setup()
    try:
        bound = bind("--port", "127.0.0.1", 0)
        gateway.port = bound.getsockname()[1]
        await Reception(runner, bound, registry, shares=shares).start()
        yield gateway
    finally:
        gateway.frontend.close()
        await runner.cleanup()
