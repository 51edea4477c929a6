"""AttentionService on a Unix socket, for one gateway.

Threads: gRPC's pool (`attention-rpc`). The one that handles the Run stream executes the steps, so
runner and device have one owner; a second Run stream is refused while the first one lives.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from attention_worker.membership import MapUser, MembershipStream
from attention_worker.model_runner import ModelRunner
from expertmesh.errors import PortError
from expertmesh.v1 import attention_service_pb2 as pb
from expertmesh.v1 import attention_service_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

_MAX_RPCS = 8
"""Describe, Run and Membership of the gateway that is there and of the one that replaces it."""

_MAX_MESSAGE_BYTES = 256 * 2**20
"""New requests carry their prompts: slots x max_model_len x 4 bytes at most, in theory."""


class AttentionServicer(pb_grpc.AttentionServiceServicer):
    """Handlers of AttentionService.

    Args:
        description: What Describe answers.
        runner: Owned by the thread of the Run stream.
        map_user: Follows the expert map.
    """

    def __init__(
        self, description: pb.DescribeResponse, runner: ModelRunner, map_user: MapUser
    ) -> None:
        self._description = description
        self._runner = runner
        self._map_user = map_user
        self._running = threading.Lock()
        self._step = threading.Lock()
        self._stopping = threading.Event()
        self._memberships: set[MembershipStream] = set()
        self._memberships_lock = threading.Lock()
        self.num_steps = 0

    def stop(self, grace_s: float) -> bool:
        """Ends Membership streams and takes no further step.

        Returns:
            False if a step is in hand still after the grace.
        """
        self._stopping.set()
        with self._memberships_lock:
            for membership in self._memberships:
                membership.end()
        if not self._step.acquire(timeout=grace_s):
            return False
        self._step.release()
        return True

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no Run stream is open; False if one is after the timeout."""
        if not self._running.acquire(timeout=timeout_s):
            return False
        self._running.release()
        return True

    def Describe(
        self, request: pb.DescribeRequest, context: grpc.ServicerContext
    ) -> pb.DescribeResponse:
        """Model, device and limits."""
        return self._description

    def Run(
        self, request_iterator: Iterator[pb.RunRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.RunResponse]:
        """Executes steps in order. A new stream knows no requests: all slots start free."""
        if not self._running.acquire(blocking=False):
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "another Run stream is open; expected one"
            )
        try:
            self._runner.reset()
            for request in request_iterator:
                with self._step:
                    if self._stopping.is_set():
                        return
                    response = self._runner.execute(request.step)
                self.num_steps += 1
                yield pb.RunResponse(step=response)
        except grpc.RpcError:
            logger.info("the Run stream was cancelled")
        finally:
            self._running.release()

    def Membership(
        self, request_iterator: Iterator[pb.MembershipRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.MembershipResponse]:
        """Takes expert maps, yields observations."""
        membership = MembershipStream(
            self._runner.model.config, self._map_user, self._runner.gate_counts
        )
        with self._memberships_lock:
            self._memberships.add(membership)
        try:
            yield from membership.serve(request_iterator, context)
        finally:
            with self._memberships_lock:
                self._memberships.discard(membership)


class AttentionServer:
    """The gRPC server; `start` binds, `stop` ends it within its grace."""

    def __init__(self, servicer: AttentionServicer, socket_path: str) -> None:
        self._servicer = servicer
        self._socket_path = socket_path
        self._pool = ThreadPoolExecutor(_MAX_RPCS, thread_name_prefix="attention-rpc")
        self._server = grpc.server(
            self._pool,
            maximum_concurrent_rpcs=_MAX_RPCS,
            options=[
                ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
            ],
        )
        pb_grpc.add_AttentionServiceServicer_to_server(servicer, self._server)

    def start(self) -> None:
        """Listens on the socket.

        Raises:
            PortError: The socket cannot be made.
        """
        address = f"unix:{self._socket_path}"
        try:
            bound = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise PortError(f"cannot listen on {address}: {error}") from error
        if not bound:
            raise PortError(f"cannot listen on {address}")
        self._server.start()

    @property
    def num_steps(self) -> int:
        """Steps that were executed, from any thread."""
        return self._servicer.num_steps

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no Run stream is open; False if one is after the timeout."""
        return self._servicer.wait_idle(timeout_s)

    def stop(self, grace_s: float) -> bool:
        """Ends all streams, after the step in hand; False if that lasts longer than the grace."""
        finished = self._servicer.stop(grace_s)
        self._server.stop(None).wait(1.0)
        self._pool.shutdown(wait=finished)
        return finished
