"""Sits in front of a gRPC server and passes on what it says and is told, message by message.

Every method is a stream of bytes both ways, which all kinds of calls are; nothing is parsed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import grpc

FORWARD = "/expertmesh.v1.ExpertService/Forward"
WATCH = "/expertmesh.v1.ExpertService/Watch"
_UNBOUNDED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


class GrpcRelay:
    """Stands in for the server at `target`; what subclasses override sees and changes messages.

    It offers no direct connection, so all rows travel over gRPC.

    Args:
        target: host:port of it.
    """

    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(target, options=_UNBOUNDED)
        self._pool = ThreadPoolExecutor(16, thread_name_prefix="grpc-relay")
        self._server = grpc.server(
            self._pool, handlers=[_AllMethods(self._pass)], options=_UNBOUNDED
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        """host:port to give to the gateway."""

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.stop(0).wait(5)
        self._channel.close()
        self._pool.shutdown()

    def asked(self, method: str, message: bytes) -> Iterable[bytes]:
        """What becomes of a message on its way there."""
        return (message,)

    def answered(self, method: str, message: bytes) -> Iterable[bytes]:
        """What becomes of a message on its way back."""
        return (message,)

    def _pass(
        self, method: str, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        call: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(method)
        replies = call(self._all_asked(method, requests))
        context.add_callback(lambda: _end(replies))
        context.send_initial_metadata(())
        try:
            for reply in replies:
                yield from self.answered(method, reply)
        except grpc.RpcError as error:
            if context.is_active() and isinstance(error, grpc.Call):
                context.abort(error.code(), error.details() or "")

    def _all_asked(self, method: str, requests: Iterator[bytes]) -> Iterator[bytes]:
        for message in requests:
            yield from self.asked(method, message)


class _AllMethods(grpc.GenericRpcHandler):
    def __init__(
        self, serve: Callable[[str, Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]
    ) -> None:
        self._serve = serve

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        """The handler of one method."""
        method = details.method

        def serve(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            return self._serve(method, requests, context)

        return grpc.stream_stream_rpc_method_handler(serve)


def _end(call: grpc.Call) -> None:
    call.cancel()
