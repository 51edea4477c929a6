"""Expert workers inside the test process: real ones on loopback, and ones that answer wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import grpc

from expert_worker.backend import ExpertBackend
from expert_worker.direct_server import DirectOffers, DirectServer, NoDirectServer, ParsedCalls
from expert_worker.maintenance import Maintenance
from expert_worker.selection import parse_experts
from expert_worker.server import SERVICE, ExpertServer
from expert_worker.servicer import ExpertServicer
from expert_worker.state import WorkerIdentity, WorkerState
from expert_worker.store import ExpertStore
from expertmesh.checkpoint import Checkpoint
from expertmesh.checksum import sealed
from expertmesh.grpc_options import server_options
from expertmesh.model_config import DtypeName
from expertmesh.placement import ExpertMap, ExpertWorkerEntry
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import Received, incarnation, sealed_receiver
from expertmesh.wire_encode import Parts, frame_of, join_message

ROW_CREDITS = 256
Answer = Callable[[pb.ForwardRequest, pb.ForwardResponse], Iterable[pb.ForwardResponse]]
"""Takes a request and the right reply; what is sent instead."""
Spoil = Callable[[bytes], bytes]


def loaded_store(checkpoint: Checkpoint, dtype: DtypeName, experts: str = "all") -> ExpertStore:
    """A store with these experts of every MoE layer."""
    store = ExpertStore(checkpoint, dtype)
    for layer in checkpoint.config.moe_layers:
        for expert in parse_experts(experts, checkpoint.config.num_experts):
            store.load(layer, expert)
    return store


def identity(worker_id: str = "worker", row_credits: int = ROW_CREDITS) -> WorkerIdentity:
    """A new life."""
    return WorkerIdentity(worker_id, incarnation(), b"numerics", row_credits, "a machine")


@contextmanager
def expert_server(
    store: ExpertStore,
    *,
    worker_id: str = "worker",
    row_credits: int = ROW_CREDITS,
    max_streams: int = 4,
    port: int = 0,
    direct: bool = True,
    scrub_mib_per_s: int = 0,
    on_drain: Callable[[], None] = lambda: None,
    on_ready: Callable[[bool], None] = lambda _ready: None,
) -> Iterator[ExpertServer]:
    """A server of a store, stopped at the end."""
    server = ExpertServer(
        store,
        identity(worker_id, row_credits),
        "127.0.0.1",
        port,
        max_streams,
        direct_port=0 if direct else None,
        scrub_mib_per_s=scrub_mib_per_s,
        on_drain=on_drain,
        on_ready=on_ready,
    )
    server.start()
    for layer, held in list(store.residency().items())[:1]:
        server.warm_up(layer, held.resident[0])  # so that no deadline of a test meets a compiler
    server.set_ready()
    try:
        yield server
    finally:
        server.stop(0.2)


@contextmanager
def expert_servers(
    checkpoint: Checkpoint, dtype: DtypeName, shares: Sequence[str]
) -> Iterator[list[ExpertServer]]:
    """Servers with these shares of the experts, named worker-0, worker-1 and so on."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                expert_server(loaded_store(checkpoint, dtype, share), worker_id=f"worker-{index}")
            )
            for index, share in enumerate(shares)
        ]


def entry_of(state: WorkerState, port: int) -> ExpertWorkerEntry:
    """What a gateway's map says of an expert worker."""
    return ExpertWorkerEntry(
        worker_id=state.identity.worker_id,
        address=f"127.0.0.1:{port}",
        incarnation=state.identity.incarnation,
        resident={layer: held.resident for layer, held in state.store.residency().items()},
        row_credits=state.identity.row_credits,
    )


def map_of(checkpoint: Checkpoint, entries: Iterable[ExpertWorkerEntry]) -> ExpertMap:
    """The first map with these expert workers."""
    return ExpertMap.empty(checkpoint.config).replaced(entries)


class FaultyServer:
    """Serves Forward; computes right replies and sends what `answer` makes of them.

    `spoil_call` and `spoil_reply` change the bytes of messages on the way.
    """

    def __init__(
        self, store: ExpertStore, answer: Answer, worker_id: str = "faulty", *, direct: bool
    ) -> None:
        self.requests: list[pb.ForwardRequest] = []
        self.spoil_call: Spoil = bytes
        self.spoil_reply: Spoil = bytes
        self._answer = answer
        self._contexts: list[grpc.ServicerContext] = []
        self._state = WorkerState(identity(worker_id), store)
        self._maintenance = Maintenance(self._state)
        self._direct: DirectOffers = NoDirectServer()
        if direct:
            self._direct = DirectServer("127.0.0.1", 0)
        self._servicer = ExpertServicer(
            self._state, ExpertBackend(store), self._maintenance, 4, self._direct, lambda _: None
        )
        for layer, held in list(store.residency().items())[:1]:
            self._servicer.warm_up(layer, held.resident[0])
        calls = ParsedCalls(self._answer_directly, 2**24)
        calls._parse = self._receive
        self._direct.serve(calls.answer_all)
        self._pool = ThreadPoolExecutor(8, "faulty-server")
        handler = grpc.stream_stream_rpc_method_handler(
            self._forward, self._receive, self._message_of
        )
        self._server = grpc.server(self._pool, options=server_options(2**24))
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Forward": handler}),)
        )
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    @property
    def entry(self) -> ExpertWorkerEntry:
        """What a gateway's map says of it."""
        return entry_of(self._state, self.port)

    def break_streams(self) -> None:
        """Ends the open streams with an error; new ones are served."""
        for context in self._contexts:
            context.cancel()
        self._contexts.clear()

    def stop(self) -> None:
        """Ends all threads."""
        self._state.stop()
        self._server.stop(0).wait(5)
        self._direct.stop()
        self._pool.shutdown()
        self._maintenance.stop()

    def _forward(
        self, requests: Iterator[Received[pb.ForwardRequest]], context: grpc.ServicerContext
    ) -> Iterator[pb.ForwardResponse]:
        with self._direct.offer() as metadata:
            context.send_initial_metadata(metadata)
            self._contexts.append(context)
            for received in requests:
                yield from self._replies(received)

    def _answer_directly(self, received: Received[pb.ForwardRequest]) -> Parts:
        replies = self._replies(received)
        return [part for reply in replies for part in frame_of(self._message_of(reply))]

    def _replies(self, received: Received[pb.ForwardRequest]) -> Iterable[pb.ForwardResponse]:
        assert received.message is not None
        self.requests.append(received.message)
        message = join_message(self._servicer.answer(received))
        return self._answer(received.message, pb.ForwardResponse.FromString(message))

    def _receive(self, message: bytes) -> Received[pb.ForwardRequest]:
        return sealed_receiver(pb.ForwardRequest)(self.spoil_call(message))

    def _message_of(self, reply: pb.ForwardResponse) -> bytes:
        """Whatever `answer` made of it, its checksum was right when it left."""
        body = pb.ForwardResponse()
        body.CopyFrom(reply)
        body.ClearField("checksum")
        return self.spoil_reply(sealed(body.SerializeToString()))


@contextmanager
def faulty_server(
    store: ExpertStore, answer: Answer, worker_id: str = "faulty", *, direct: bool = False
) -> Iterator[FaultyServer]:
    """A faulty server, stopped at the end; with direct connections if asked for."""
    server = FaultyServer(store, answer, worker_id, direct=direct)
    try:
        yield server
    finally:
        server.stop()
