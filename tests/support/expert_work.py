"""Dispatches for tests of expert clients: rows, routing, and what servers answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from attention_worker.experts import ExpertClient, LocalExperts, Pending, RemoteExperts
from expertmesh.checkpoint import Checkpoint
from expertmesh.model_config import DtypeName
from expertmesh.placement import ExpertWorkerEntry
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh_kernels.host import TORCH_DTYPES
from expertmesh_kernels.router import Routing
from tests.support.expert_servers import Answer, loaded_store, map_of
from tests.support.processes import poll
from tests.support.tiny_checkpoints import MIXTRAL

TIMEOUT_S = 20.0
NUM_EXPERTS, TOP_K, HIDDEN = MIXTRAL.num_experts, MIXTRAL.top_k, MIXTRAL.hidden_size


@dataclass(frozen=True)
class Work:
    """A dispatch: rows and their routing."""

    h_TH: Tensor
    routing: Routing
    layer: int = 1
    num_generated_rows: int = 0

    def dispatch_on(self, client: ExpertClient, timeout_s: float = TIMEOUT_S) -> Pending:
        """Rows on their way."""
        deadline_s = time.monotonic() + timeout_s
        return client.dispatch(
            self.layer, self.h_TH, self.routing, self.num_generated_rows, deadline_s
        )

    def run(self, client: ExpertClient, timeout_s: float = TIMEOUT_S) -> Tensor:
        """The combined rows."""
        return self.dispatch_on(client, timeout_s).result()


def work(num_rows: int, dtype: DtypeName = "float32", *, seed: int = 0, layer: int = 1) -> Work:
    """Random rows, routed at random."""
    rng = np.random.default_rng(seed)
    h_TH = torch.from_numpy(rng.standard_normal((num_rows, HIDDEN), dtype=np.float32))
    ids_TK = np.argsort(rng.random((num_rows, NUM_EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    weights_TK = rng.random((num_rows, TOP_K), dtype=np.float32)
    routing = Routing.of(np.ascontiguousarray(ids_TK), weights_TK, NUM_EXPERTS)
    return Work(h_TH.to(TORCH_DTYPES[dtype]), routing, layer, num_rows // 2)


def to_expert(expert: int, num_rows: int = 1) -> Work:
    """Rows for one expert and its neighbour."""
    base = work(num_rows)
    ids = np.array([[expert, (expert + 1) % NUM_EXPERTS]] * num_rows, np.int32)
    return replace(base, routing=Routing.of(ids, base.routing.topk_weights_TK, NUM_EXPERTS))


def local(checkpoint: Checkpoint, dtype: DtypeName = "float32") -> LocalExperts:
    """All experts in this process."""
    return LocalExperts(loaded_store(checkpoint, dtype))


@contextmanager
def remote(
    checkpoint: Checkpoint,
    entries: Iterable[ExpertWorkerEntry],
    dtype: DtypeName = "float32",
    *,
    direct: bool = False,
    allow_degraded: bool = False,
) -> Iterator[RemoteExperts]:
    """A client of these expert workers, in its first step.

    With `direct` it has a direct connection to each of them, so dispatches go the ordinary way.
    """
    config, fingerprint = checkpoint.config, checkpoint.fingerprint
    experts = RemoteExperts(config, fingerprint, dtype, allow_degraded=allow_degraded)
    experts.warm_up()  # deadlines do not count on compiling
    try:
        experts.update_map(map_of(checkpoint, entries), gateway=77)
        if direct:
            wait_direct(experts)
        experts.begin_step(1)
        yield experts
    finally:
        experts.close()


def is_direct(experts: RemoteExperts) -> bool:
    """True if there is a direct connection to every expert worker."""
    return all(stream.usable and stream.interest[0] >= 0 for stream in experts._routes.streams)


def wait_direct(experts: RemoteExperts) -> None:
    """Until there is."""
    poll(lambda: is_direct(experts), timeout_s=TIMEOUT_S, what="direct connections")


def right(request: pb.ForwardRequest, reply: pb.ForwardResponse) -> list[pb.ForwardResponse]:
    """Answers as it should."""
    return [reply]


def silent(request: pb.ForwardRequest, reply: pb.ForwardResponse) -> list[pb.ForwardResponse]:
    """Does not answer."""
    return []


def changed(change: Callable[[pb.ForwardResponse], object]) -> Answer:
    """Changes the right reply."""

    def answer(
        request: pb.ForwardRequest, reply: pb.ForwardResponse
    ) -> Iterable[pb.ForwardResponse]:
        change(reply)
        return [reply]

    return answer


def threads(prefix: str) -> list[str]:
    """Names of the threads that start so."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]
