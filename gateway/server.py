"""A gateway from its settings to its end: what it is made of, in which order it starts and stops.

    main thread    event loop: HTTP and gRPC APIs, signals
    engine-N       scheduler and output streams of an attention worker
    membership     expert maps; watch-<address>: one expert worker each; arbiter: disputes
    placement      as leader, orders to expert workers; election: who leads
    scaling        as leader, asks for more or fewer expert workers; not by default
    attention-*    streams to the attention workers, child processes

Start: ports, checkpoint, expert workers are looked for, attention workers, engines, APIs. Expert
workers may still be missing then: /ready tells. Stop is the reverse, a second beyond the grace.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from expertmesh.attention_settings import AttentionWorkerSettings
from expertmesh.checkpoint import Checkpoint, name_of_folder
from expertmesh.cores import share_cores, usable_cores
from expertmesh.errors import StartupError
from expertmesh.expert_plan import ExpertPlan, plan_experts
from expertmesh.model_config import DtypeName
from expertmesh.model_tools.progress import NoProgress
from expertmesh.model_tools.resolve import DEMO_NAMES, resolve_model
from expertmesh.placement import ExpertMap, missing_pairs
from expertmesh.settings import GatewaySettings, data_home
from expertmesh.transport import make_transport
from expertmesh.v1 import attention_service_pb2 as pb
from expertmesh.wire import incarnation
from gateway.attention.group import AttentionGroup
from gateway.engine.engine import Engine
from gateway.engine.engine_observer import ObserverPair
from gateway.engine.engine_pool import EnginePool
from gateway.engine.inquiry import InquiryTurn
from gateway.engine_metrics import cache_config
from gateway.mesh.arbiter import CheckpointArbiter, NoArbiter
from gateway.mesh.discovery import Discovery, StaticDiscovery
from gateway.mesh.discovery_metrics import DiscoveryCollector
from gateway.mesh.discovery_setup import make_discovery
from gateway.mesh.dispatch_totals import DispatchTotals
from gateway.mesh.gate_totals import GateTotals
from gateway.mesh.membership import Membership, ServedIdentity
from gateway.mesh.mesh_status import MeshStatus
from gateway.placement.metrics import PlacementCollector
from gateway.placement.operator import Operator, StaticPlacement
from gateway.placement.setup import make_placement, start_placement
from gateway.public_apis import PublicApis
from gateway.request_log import RequestLog
from gateway.request_metrics import RequestMetrics
from gateway.sampling_defaults import SamplingDefaults
from gateway.scaling.scaler import NoScaler, Scaler
from gateway.scaling.setup import make_scaler
from gateway.service import ApiLimits, GenerationFrontend, ServedModel
from gateway.telemetry.collector import TelemetryCollector
from gateway.telemetry.devices import find_devices
from gateway.telemetry.setup import make_telemetry
from gateway.telemetry.telemetry import Telemetry
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer

_STEP_GRACE_S = 0.3
"""For the step in flight at the end; then its attention worker is stopped."""
_CHILD_GRACE_S = 0.4
"""For the attention worker to end by itself: it has nothing that would have to be saved."""
Made = TypeVar("Made")
_NO_EXPERT_WORKERS = "no expert workers are known: see --experts"


class Gateway:
    """The parts of a gateway. All methods run in the event loop's thread.

    Attributes:
        attention: The attention workers, once they are being started.
        frontend: The way in for requests, once it is open.
        info: Content of the ready line: ports and what is served.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._interrupted = False
        self._checkpoint: Checkpoint | None = None
        self.attention: AttentionGroup | None = None
        self._discovery: Discovery = StaticDiscovery(())
        self._membership: Membership | None = None
        self._placement: Operator = StaticPlacement()
        self._scaler: Scaler = NoScaler()
        self._engine: EnginePool | None = None
        self.frontend: GenerationFrontend | None = None
        self._dispatch = DispatchTotals()
        self._gate = GateTotals()
        self._telemetry = Telemetry()
        self.info: dict[str, object] = {}
        self._transport = make_transport(settings.mesh.tls_files)
        self._apis = PublicApis(settings)

    async def start(self) -> None:
        """Starts everything; ports are bound and the attention workers are up at return.

        Raises:
            StartupError: Something cannot start. `stop` is to be called all the same.
        """
        self._apis.bind()
        checkpoint = await self._unless_interrupted(self._open)
        self._discovery = await self._unless_interrupted(make_discovery, self._settings.mesh)
        config = checkpoint.config
        self._gate = GateTotals(len(config.moe_layers), config.num_experts)
        self._membership = self._watch_experts(checkpoint)
        self._placement = await self._unless_interrupted(
            make_placement,
            *(self._settings.mesh, checkpoint, self._expert_plan(checkpoint), self._membership),
            self._transport,
        )
        self._scaler = await self._unless_interrupted(
            make_scaler,
            *(self._settings.scaling, self._settings.mesh),
            *(self._membership.known_workers, self._placement),
        )
        self.attention = self._make_attention(checkpoint)
        self._membership.start()
        start_placement(self._placement)
        self._scaler.start()
        await asyncio.to_thread(self.attention.start)
        await self._serve(checkpoint)

    async def _unless_interrupted(self, make: Callable[..., Made], *arguments: Any) -> Made:
        """Makes something that may take its time, in a thread. Raises StartupError afterwards, if
        the gateway was told to stop meanwhile."""
        made = await asyncio.to_thread(make, *arguments)
        if self._interrupted:
            raise StartupError("the gateway was told to stop")
        return made

    async def interrupt(self) -> None:
        """Makes a `start` that is under way fail soon."""
        self._interrupted = True
        if self.attention is not None:
            await asyncio.to_thread(self.attention.stop, _CHILD_GRACE_S)

    def mesh(self) -> MeshStatus:
        """State of the expert workers and of the attention worker; from any thread."""
        if self._membership is None:
            return MeshStatus(ready=False, message="the gateway is starting")
        status = self._membership.status()
        if self._engine is None or not self._engine.ready:
            return dataclasses.replace(
                status, ready=False, message="the attention worker is restarting"
            )
        if not status.uncovered:
            return status
        if not status.workers:
            why = self._discovery.report().problem or _NO_EXPERT_WORKERS
            return dataclasses.replace(status, message=why)
        count = sum(len(experts) for experts in status.uncovered.values())
        coming = self._placement.report().num_coming(missing_pairs(status.uncovered))
        why = f"{count} experts have no usable copy" + (f", {coming} on their way" * bool(coming))
        return dataclasses.replace(status, message=why)

    def work_done(self) -> tuple[int, int]:
        """Differs whenever requests were computed or came; from any thread."""
        assert self._engine is not None, "it is started"
        stats = self._engine.stats()
        return stats.num_steps, stats.num_waiting

    def summary(self) -> str:
        """For the log: what is served, and where."""
        host = self._settings.http.host
        return (
            f"serving {self.info.get('model')}: HTTP on {host} port {self.info.get('http_port')},"
            f" gRPC on port {self.info.get('grpc_port')}"
        )

    async def drain(self, grace_s: float) -> None:
        """Refuses new clients and lets the requests of others finish, for this long."""
        await self._apis.drain(grace_s)

    async def stop(self) -> None:
        """Ends everything: requests with an error, then APIs, threads and the child process."""
        if self.frontend is not None:
            self.frontend.stop_accepting()
        engine_ended = True
        if self._engine is not None:
            engine_ended = await asyncio.to_thread(self._engine.stop, _STEP_GRACE_S)
        await asyncio.gather(self._apis.stop(), self._stop_mesh())
        if self._engine is not None and not engine_ended:
            await asyncio.to_thread(self._engine.stop, 1.0)
        if self.frontend is not None:
            await asyncio.to_thread(self.frontend.close)
        await asyncio.to_thread(self._telemetry.stop)
        if self._checkpoint is not None:
            self._checkpoint.close()

    def _open(self) -> Checkpoint:
        """In a thread: finds the model and reads its headers."""
        name = self._settings.model.model
        folder = resolve_model(name, data_home(), NoProgress()).absolute()
        self._checkpoint = Checkpoint.open(folder)
        return self._checkpoint

    def _dtype(self, checkpoint: Checkpoint) -> DtypeName:
        dtype = self._settings.model.dtype
        return checkpoint.config.dtype if dtype == "auto" else dtype

    def _expert_plan(self, checkpoint: Checkpoint) -> ExpertPlan:
        setting = self._settings.model.expert_dtype
        return plan_experts(checkpoint, setting, self._dtype(checkpoint))

    def _colocated(self, checkpoint: Checkpoint) -> bool:
        return self._settings.mesh.colocated or not checkpoint.config.moe_layers

    def _watch_experts(self, checkpoint: Checkpoint) -> Membership:
        served = ServedIdentity(
            *(checkpoint.name, checkpoint.fingerprint, self._dtype(checkpoint)),
            expert_dtype=self._expert_plan(checkpoint).name,
            max_step_tokens=self._settings.engine.max_num_batched_tokens,
        )
        membership = Membership(
            self._discovery,
            served,
            checkpoint.config,
            colocated=self._colocated(checkpoint),
            allow_degraded=self._settings.mesh.allow_degraded,
            hands_over=self._settings.mesh.placement == "auto",
            transport=self._transport,
            arbiter=NoArbiter() if self._colocated(checkpoint) else CheckpointArbiter(checkpoint),
        )
        membership.subscribe(self._use_map)
        return membership

    def _use_map(self, expert_map: ExpertMap) -> None:
        """In the membership thread: the attention worker first, then a retry of a held step."""
        if self.attention is not None:
            self.attention.update_map(expert_map)
        if self._engine is not None:
            self._engine.map_changed()

    def _make_attention(self, checkpoint: Checkpoint) -> AttentionGroup:
        mesh = self._settings.mesh
        settings = AttentionWorkerSettings(
            tls=mesh.tls,
            model=str(checkpoint.model_dir),
            dtype=self._settings.model.dtype,
            expert_dtype=self._settings.model.expert_dtype,
            max_model_len=self._settings.model.max_model_len,
            colocated=self._colocated(checkpoint),
            wire_dtype=mesh.wire_dtype,
            overlap=mesh.overlap,
            allow_degraded=mesh.allow_degraded,
            engine=self._settings.engine,
            log=self._settings.log,
        )
        shares = share_cores(
            usable_cores(), mesh.attention_workers, max_threads=mesh.threads, pin=mesh.pin_cores
        )
        return AttentionGroup(
            settings,
            shares,
            checkpoint.fingerprint,
            incarnation(),
            on_observations=self._take_observations,
        )

    def _take_observations(self, response: pb.MembershipResponse) -> None:
        """In a thread of an attention worker's: what that has seen since the last time."""
        self._dispatch.add(response)
        self._gate.add(response)

    async def _serve(self, checkpoint: Checkpoint) -> None:
        """Engine and APIs, once the attention worker is up."""
        assert self.attention is not None
        tokenizer = await asyncio.to_thread(Tokenizer.from_checkpoint, checkpoint.model_dir)
        registry = CollectorRegistry()
        metrics = RequestMetrics(registry, self._model_name(checkpoint))
        eos = {*checkpoint.config.eos_token_ids, *(tokenizer.eos_ids if tokenizer else ())}
        observer = ObserverPair(metrics, RequestLog(self._model_name(checkpoint)))
        turn = InquiryTurn()
        engines = [
            Engine(
                client,
                self._settings.engine,
                asyncio.get_running_loop(),
                tokenizer=tokenizer,
                eos_token_ids=eos,
                observer=observer,
                turn=turn,
                name=f"engine-{index}",
            )
            for index, client in enumerate(self.attention)
        ]
        self._engine = engine = EnginePool(
            engines, self._dispatch.snapshot, self._dispatch.num_dropped_pairs
        )
        engine.start()
        metrics.watch(engine.stats, self.mesh, cache_config(self._settings.engine, engine.limits))
        registry.register(PlacementCollector(self._placement.report))
        self._scaler.register(registry)
        registry.register(DiscoveryCollector(self._discovery.report))
        model = self._served_model(checkpoint, tokenizer, engine.limits.max_model_len)
        self.frontend = GenerationFrontend(engine, model, self.mesh, self._api_limits())
        self._telemetry = self._make_telemetry(checkpoint, engine, metrics)
        self._telemetry.start()
        registry.register(TelemetryCollector(self._telemetry, find_devices()))
        port, grpc_port = await self._apis.open(
            self.frontend, registry, self._placement, self._telemetry
        )
        self.info = {
            "port": port,
            "http_port": port,
            "grpc_port": grpc_port,
            "model": model.name,
            "attention_worker_pids": self.attention.pids,
            "kv_cache_tokens": engine.limits.kv_cache_tokens,
        }

    def _make_telemetry(
        self, checkpoint: Checkpoint, engine: EnginePool, metrics: RequestMetrics
    ) -> Telemetry:
        assert self._membership is not None
        return make_telemetry(
            checkpoint.config,
            self._settings.mesh.attention_workers if self._colocated(checkpoint) else 0,
            self._membership,
            gate_rows=self._gate.snapshot,
            mesh=self.mesh,
            stats=engine.stats,
            children=self._children,
            requests=metrics.totals,
            placement=self._placement,
        )

    def _children(self) -> dict[str, int]:
        return {} if self.attention is None else self.attention.processes

    def _api_limits(self) -> ApiLimits:
        """What the queue could never take is refused for good, not for now."""
        engine, most = self._settings.engine, ApiLimits()
        return dataclasses.replace(
            most,
            max_prompts=min(most.max_prompts, engine.max_num_queued_reqs + engine.max_num_seqs),
            max_prompt_tokens=engine.max_num_queued_tokens,
            request_timeout_s=engine.request_timeout_s,
        )

    def _model_name(self, checkpoint: Checkpoint) -> str:
        given = self._settings.model
        folder = Path(checkpoint.model_dir)
        named = given.model if given.model in DEMO_NAMES else name_of_folder(folder)
        return given.served_model_name or named

    def _served_model(
        self, checkpoint: Checkpoint, tokenizer: Tokenizer | None, max_model_len: int
    ) -> ServedModel:
        return ServedModel(
            name=self._model_name(checkpoint),
            config=checkpoint.config,
            max_model_len=max_model_len,
            dtype=self._dtype(checkpoint),
            tokenizer=tokenizer,
            chat_template=ChatTemplate.from_checkpoint(checkpoint.model_dir, tokenizer),
            fingerprint=checkpoint.fingerprint.hex(),
            sampling_defaults=SamplingDefaults.from_checkpoint(
                Path(checkpoint.model_dir), checkpoint.config.vocab_size
            ),
            name_required=self._settings.http.require_model,
        )

    async def _stop_mesh(self) -> None:
        parts = []
        if self.attention is not None:
            parts.append(asyncio.to_thread(self.attention.stop, _CHILD_GRACE_S))
        parts.append(asyncio.to_thread(self._stop_watching))
        await asyncio.gather(*parts)

    def _stop_watching(self) -> None:
        self._scaler.stop()
        self._placement.stop()
        if self._membership is not None:
            self._membership.stop()
