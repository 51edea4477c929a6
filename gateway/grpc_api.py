"""The public gRPC API: GenerationService, health and reflection, on grpc.aio.

It runs in the event loop of the HTTP server and uses the same checks and the same frontend, so both
APIs give the same tokens and refuse the same requests.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from expertmesh import PROTOCOL_REVISION, __version__
from expertmesh.addresses import join_address
from expertmesh.errors import PortError, RequestError
from expertmesh.v1 import generation_service_pb2 as pb
from gateway.api_keys import ApiKeys, bearer_key
from gateway.api_tls import ApiTransport, PlainApi
from gateway.descriptor_shares import DescriptorShares
from gateway.generation_options import check_token_ids
from gateway.grpc_calls import GenerateCall, expert_snapshot
from gateway.grpc_errors import status_of
from gateway.service import ApiLimits, GenerationFrontend, new_id

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name

_POLL_S = 0.2
"""How soon a change of the expert map or of readiness is seen."""
_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_MAX_RPCS = 2048
_LONG_AGO_S = 0.0
"""When clients connected: a server that stops takes no connection, and sends off those that it has.
"""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
Stream = AsyncGenerator[Response, None]


class GenerationApi:
    """The rpcs. They raise our exceptions; `_unary` and `_streaming` turn them into statuses."""

    def __init__(self, frontend: GenerationFrontend) -> None:
        self._frontend = frontend
        self._model = frontend.model

    async def generate(
        self, request: pb.GenerateRequest, remaining_s: float | None
    ) -> Stream[pb.GenerateResponse]:
        """Streams deltas; the last message has the finish reason and the usage.

        Args:
            request: What to generate.
            remaining_s: Seconds until the client's deadline; None without one.
        """
        call = GenerateCall(request, self._frontend, self._request_id(request.request_id))
        prompt = await call.prepare(remaining_s)
        with self._frontend.open([prompt], connected_s=_LONG_AGO_S) as stream:
            while not stream.done:
                for _, output in await stream.next() or ():
                    response = call.response(output)
                    if response is not None:
                        yield response

    def _request_id(self, wanted: str) -> str:
        if wanted and not _SANE_REQUEST_ID.fullmatch(wanted):
            raise RequestError(
                "request_id must have 1 to 128 letters, digits, or ._:/+=-", param="request_id"
            )
        return wanted or new_id("gen-")

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        """Text to token ids."""
        tokenizer = self._model.tokenizer
        if tokenizer is None:
            raise _no_tokenizer("text")
        special = request.add_special_tokens or not request.HasField("add_special_tokens")
        ids = await self._frontend.run_in_thread(tokenizer.encode, request.text, special)
        return pb.TokenizeResponse(token_ids=ids, max_model_len=self._model.max_model_len)

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        """Token ids to text."""
        tokenizer = self._model.tokenizer
        if tokenizer is None:
            raise _no_tokenizer("token_ids")
        if not request.token_ids:
            return pb.DetokenizeResponse()
        ids = check_token_ids(request.token_ids, self._model.config.vocab_size, "token_ids")
        text = await self._frontend.run_in_thread(tokenizer.decode, ids)
        return pb.DetokenizeResponse(text=text)

    async def abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        """Ends a running Generate call."""
        return pb.AbortResponse(found=self._frontend.abort(request.request_id))

    async def get_model_info(self, request: pb.GetModelInfoRequest) -> pb.GetModelInfoResponse:
        """The model that is served."""
        model, config = self._model, self._model.config
        return pb.GetModelInfoResponse(
            model=model.name,
            family=config.family,
            max_model_len=model.max_model_len,
            vocab_size=config.vocab_size,
            num_layers=config.num_layers,
            num_moe_layers=len(config.moe_layers),
            num_experts=config.num_experts,
            top_k=config.top_k,
            dtype=model.dtype,
            has_tokenizer=model.tokenizer is not None,
        )

    async def get_server_info(self, request: pb.GetServerInfoRequest) -> pb.GetServerInfoResponse:
        """The gateway: version, readiness, load."""
        stats = self._frontend.stats()
        return pb.GetServerInfoResponse(
            version=__version__,
            protocol_revision=PROTOCOL_REVISION,
            ready=self._frontend.ready,
            num_requests_running=stats.num_running,
            num_requests_waiting=stats.num_waiting,
            expert_map_epoch=self._frontend.mesh().epoch,
        )

    async def watch_experts(
        self, request: pb.WatchExpertsRequest, remaining_s: float | None
    ) -> Stream[pb.WatchExpertsResponse]:
        """The expert workers now and after every change, until the gateway stops."""
        last = None
        while self._frontend.accepting:
            mesh = self._frontend.mesh()
            if mesh != last:
                last = mesh
                yield expert_snapshot(mesh)
            await asyncio.sleep(_POLL_S)


def _no_tokenizer(param: str) -> RequestError:
    return RequestError("this model has no tokenizer", param=param, code="unsupported_by_model")


class GrpcServer:
    """The gRPC server of a gateway.

    Args:
        frontend: Where answers come from.
        host: Address to bind.
        port: Port to bind; 0 picks a free one.
        keys: Which callers are served.
        transport: How clients connect; in plain text by default.
    """

    def __init__(
        self,
        frontend: GenerationFrontend,
        host: str,
        port: int,
        keys: ApiKeys | None = None,
        transport: ApiTransport | None = None,
    ) -> None:
        self._frontend = frontend
        self._keys = keys or ApiKeys()
        self._address = join_address(host, port)
        self._transport = transport or PlainApi()
        self._health = health_aio.HealthServicer()
        self._follow: asyncio.Task[None] | None = None
        self._server: grpc.aio.Server | None = None
        self._leaving: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Binds and serves; returns the port.

        Raises:
            PortError: The address cannot be bound.
        """
        server = grpc.aio.server(
            options=_server_options(self._frontend.limits),
            maximum_concurrent_rpcs=_MAX_RPCS,
        )
        server.add_generic_rpc_handlers(
            (_generation_handler(GenerationApi(self._frontend), self._keys),)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
        try:
            port = self._transport.bind(server, self._address)
        except RuntimeError as error:
            raise PortError(
                f"cannot listen on {self._address} for gRPC", fix="choose another --grpc-port"
            ) from error
        await server.start()
        self._server = server
        self._follow = asyncio.create_task(self._follow_readiness(), name="grpc-health")
        return port

    def leave(self, grace_s: float) -> None:
        """Has clients connect anew for later calls, which leads them elsewhere; those that run have
        some time. `stop` is to follow."""
        self._leaving = asyncio.create_task(self._end(grace_s), name="grpc-leave")

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, gives running ones some time, and ends."""
        await self._end(grace_s)
        if self._leaving is not None:
            await self._leaving

    async def _end(self, grace_s: float) -> None:
        if self._follow is not None:
            self._follow.cancel()
            with suppress(asyncio.CancelledError):
                await self._follow
        await self._health.enter_graceful_shutdown()
        if self._server is not None:
            await self._server.stop(grace_s)

    async def _follow_readiness(self) -> None:
        """Health says SERVING while a request can be served."""
        last = None
        while True:
            ready = self._frontend.ready
            if ready != last:
                last = ready
                states = health_pb2.HealthCheckResponse
                status = states.SERVING if ready else states.NOT_SERVING
                for service in ("", SERVICE):
                    await self._health.set(service, status)
            await asyncio.sleep(_POLL_S)


def _server_options(limits: ApiLimits) -> list[tuple[str, int]]:
    return [
        # A connection too many is closed at once, which its client sees as UNAVAILABLE.
        ("grpc.max_allowed_incoming_connections", DescriptorShares.now().grpc),
        ("grpc.server_handshake_timeout_ms", round(limits.header_timeout_s * 1000)),
        ("grpc.so_reuseport", 0),  # a second server on the port must fail
        ("grpc.max_receive_message_length", limits.max_body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.compression_enabled_algorithms_bitset", 1),  # none: no decompression bombs
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]


def _generation_handler(api: GenerationApi, keys: ApiKeys) -> grpc.GenericRpcHandler:
    """The rpcs by name, with a deserializer that does not turn bad bytes into UNKNOWN."""
    door = _Door(keys)
    unary, streaming = door.unary, door.streaming
    handlers = {
        "Generate": streaming("Generate", api.generate, pb.GenerateRequest),
        "Tokenize": unary("Tokenize", api.tokenize, pb.TokenizeRequest),
        "Detokenize": unary("Detokenize", api.detokenize, pb.DetokenizeRequest),
        "Abort": unary("Abort", api.abort, pb.AbortRequest),
        "GetModelInfo": unary("GetModelInfo", api.get_model_info, pb.GetModelInfoRequest),
        "GetServerInfo": unary("GetServerInfo", api.get_server_info, pb.GetServerInfoRequest),
        "WatchExperts": streaming("WatchExperts", api.watch_experts, pb.WatchExpertsRequest),
    }
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


class _Malformed:
    """Stands for a message whose bytes are not one."""


def _parser(kind: type[Request]) -> Callable[[bytes], Request | _Malformed]:
    def parse(data: bytes) -> Request | _Malformed:
        try:
            return kind.FromString(data)
        except DecodeError:
            return _Malformed()

    return parse


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


class _Door:
    """Makes handlers that check keys and messages, and turn exceptions into statuses.

    Args:
        keys: Which callers are served.
    """

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    def unary(
        self, name: str, method: Callable[[Request], Awaitable[Response]], kind: type[Request]
    ) -> Handler:
        """Handler of an rpc with one response."""

        async def call(request: Request | _Malformed, context: Context) -> Response:
            try:
                return await method(self._checked(request, context))
            except Exception as error:
                await context.abort_with_status(rpc_status.to_status(status_of(error, name)))

        return grpc.unary_unary_rpc_method_handler(call, _parser(kind), _serialize)

    def streaming(
        self,
        name: str,
        method: Callable[[Request, float | None], Stream[Response]],
        kind: type[Request],
    ) -> Handler:
        """Handler of an rpc with a stream of responses."""

        async def call(request: Request | _Malformed, context: Context) -> Stream[Response]:
            try:
                checked = self._checked(request, context)
                async with aclosing(method(checked, context.time_remaining())) as responses:
                    async for response in responses:
                        yield response
            except Exception as error:
                await context.abort_with_status(rpc_status.to_status(status_of(error, name)))

        return grpc.unary_stream_rpc_method_handler(call, _parser(kind), _serialize)

    def _checked(self, request: Request | _Malformed, context: Context) -> Request:
        metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
        shown = metadata.get("authorization")
        self._keys.check(bearer_key(shown) if isinstance(shown, str) else None)
        if isinstance(request, _Malformed):
            raise RequestError("the bytes are not a message of this method", code="invalid_message")
        return request
