"""An expert worker from its settings to a healthy server."""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Callable

import torch

from expert_worker.memory import affordable_slots, check_memory, give_back_freed_memory
from expert_worker.metrics import serve_metrics
from expert_worker.selection import chosen_experts
from expert_worker.server import ExpertServer
from expert_worker.state import WorkerIdentity
from expert_worker.store import ExpertStore, ExpertStoreError
from expertmesh.checkpoint import Checkpoint
from expertmesh.cores import threads_of_environment
from expertmesh.errors import StartupError
from expertmesh.model_config import DtypeName
from expertmesh.settings import ExpertWorkerSettings
from expertmesh.stop_request import StopRequest
from expertmesh.transport import make_transport
from expertmesh.wire import incarnation
from expertmesh_kernels.cpu.team import start_team
from expertmesh_kernels.self_test import experts_fingerprint

logger = logging.getLogger(__name__)

_REPORT_INTERVAL_S = 5.0
_SWITCH_INTERVAL_S = 0.0005
"""A thread that loads experts keeps Python's lock no longer while a call wants it."""


class ExpertWorker:
    """A server that answers health checks and Watch once `start` was called, and calls as experts
    arrive, at once or later: `warm_up` comes first, `load` last.

    Args:
        settings: Where to serve and how.
        checkpoint: What to serve.
        metrics_port: Port of /metrics; None for no metrics.
        on_drain: Called when a drain was ordered, in any thread; has `stop` called.
        on_ready: Called with True once it is healthy, and with False when it will refuse calls.

    Raises:
        StartupError: The settings cannot work, the checkpoint cannot be served, or a port is taken.
        RuntimeError: The kernels do not compute what they must on this machine.
    """

    def __init__(
        self,
        settings: ExpertWorkerSettings,
        checkpoint: Checkpoint,
        metrics_port: int | None = None,
        on_drain: Callable[[], None] = lambda: None,
        on_ready: Callable[[bool], None] = lambda _ready: None,
    ) -> None:
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        torch.set_num_threads(1)  # the kernels have their own team; a second pool would take cores
        start_team(threads_of_environment() or 1)
        self._settings = settings
        config = checkpoint.config
        self._chosen = chosen_experts(settings.experts, config, settings.expert_slots)
        dtype: DtypeName = config.dtype if settings.dtype == "auto" else settings.dtype
        self.store = ExpertStore(
            checkpoint, dtype, settings.device, expert_dtype=settings.expert_dtype
        )
        # A free port is known too late; two workers on one host must not share a name.
        number = settings.port or os.getpid()
        self.worker_id = settings.worker_id or f"{socket.gethostname()}-{number}"
        identity = WorkerIdentity(
            worker_id=self.worker_id,
            incarnation=incarnation(),
            numerics_fingerprint=experts_fingerprint(
                dtype, self.store.device, self.store.code_names
            ),
            row_credits=settings.row_credits,
            node=settings.node or socket.gethostname(),
        )
        self.transport = make_transport(settings.tls_files, serves=True)
        has_direct = settings.direct_port >= 0 and self.transport.allows_direct
        if not self.transport.allows_direct:
            logger.info("rows travel by gRPC alone: direct connections have no TLS")
        self.server = ExpertServer(
            self.store,
            identity,
            settings.host,
            settings.port,
            settings.max_streams,
            direct_port=settings.direct_port if has_direct else None,
            drain_grace_s=settings.drain_grace_s,
            scrub_mib_per_s=settings.scrub_mib_per_s,
            on_drain=on_drain,
            on_ready=on_ready,
            transport=self.transport,
        )
        self._metrics = None
        if metrics_port is not None:
            self._metrics = serve_metrics(
                self.server.state, self.server.scrubber.counts, settings.host, metrics_port
            )
            port = self._metrics[0].server_port
            logger.info("metrics on http://%s:%d/metrics", settings.host, port)

    def warm_up(self) -> None:
        """Compiles the kernels of calls before there is one, with experts that do not stay.

        Raises:
            CheckpointError: An expert cannot be read.
        """
        for layer in self.store.first_layers():
            self.store.load(layer, 0)
            self.server.warm_up(layer, 0)
            self.store.retire(layer, 0)
            self.store.unload(layer, 0, timeout_s=0.0)
        gc.collect()
        give_back_freed_memory()

    def start(self) -> None:
        """Decides how many experts there is room for, and begins to serve."""
        self.store.limit_slots(self._settings.expert_slots or self._affordable_slots())
        self.server.start()

    def load(self, stopping: StopRequest) -> bool:
        """Loads the experts of the settings, then says that it is healthy; False if interrupted.

        Raises:
            StartupError: An expert cannot be read or held.
        """
        reported_s = time.monotonic()
        for done, (layer, expert) in enumerate(self._chosen):
            if stopping.made:
                return False
            try:
                check_memory(self.store)
                self.store.load(layer, expert)
            except ExpertStoreError as error:
                raise StartupError(str(error), fix="use fewer --experts") from error
            if time.monotonic() - reported_s > _REPORT_INTERVAL_S:
                reported_s = time.monotonic()
                logger.info("loaded %d of %d experts", done + 1, len(self._chosen))
        give_back_freed_memory()
        self.server.set_ready()
        logger.info(
            "serving %d experts of %s, with room for %d (%.1f MiB, %s) on %s:%d",
            self.store.num_used_slots,
            self.store.checkpoint.name,
            self.store.num_slots,
            self.store.resident_bytes / 2**20,
            self.store.plan.name,
            self._settings.host,
            self.server.port,
        )
        return True

    def begin_drain(self) -> float:
        """Announces that it leaves; seconds that this may take."""
        self.server.state.begin_drain(self._settings.drain_grace_s)
        return self.server.state.drain_left_s

    def stop(self) -> None:
        """Drains and ends all threads."""
        self.server.stop()
        if self._metrics is not None:
            server, thread = self._metrics
            server.shutdown()
            server.server_close()
            thread.join(2.0)

    def _affordable_slots(self) -> int:
        """What free memory has room for, and those of the settings in any case."""
        found, wanted = affordable_slots(self.store), len(self._chosen)
        if found < wanted:
            logger.warning("free memory has room for %d experts, perhaps not for %d", found, wanted)
        return max(found, wanted)
