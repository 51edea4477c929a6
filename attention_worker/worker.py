"""An attention worker from its settings to a server: load, check, warm up, describe."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from attention_worker.drafts import Speculation
from attention_worker.experts import ExpertClient, LocalExperts, RemoteExperts
from attention_worker.grammar import GrammarMasker
from attention_worker.kv_cache import (
    KvPoolSettings,
    PagedKvCache,
    available_memory,
    choose_num_kv_blocks,
)
from attention_worker.loader import load_model
from attention_worker.membership import MapUser, NoMapUser
from attention_worker.model import Model
from attention_worker.model_runner import ModelRunner, RunnerLimits
from attention_worker.model_states.paged_kv import PagedKvState
from attention_worker.overlap import NeverSplit, SplitByTimes
from attention_worker.server import AttentionServer, AttentionServicer
from attention_worker.warm_up import ZeroExperts, warm_up
from expert_worker.store import ExpertStore
from expertmesh import PROTOCOL_REVISION
from expertmesh.attention_settings import AttentionWorkerSettings
from expertmesh.checkpoint import Checkpoint
from expertmesh.cores import threads_of_environment
from expertmesh.errors import SettingsError, StartupError
from expertmesh.expert_plan import plan_experts
from expertmesh.model_config import DtypeName, MlaConfig, ModelConfig
from expertmesh.model_tools.model_size import model_size
from expertmesh.model_tools.worker_memory import attention_worker_nbytes
from expertmesh.transport import make_transport
from expertmesh.v1 import attention_service_pb2 as pb
from expertmesh.v1 import expert_service_pb2
from expertmesh.wire import DTYPE_CODES, WireDtype, incarnation, wire_dtypes
from expertmesh_kernels.cpu.team import start_team
from expertmesh_kernels.host import TORCH_DTYPES, find_device
from expertmesh_kernels.self_test import numerics_fingerprint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionWorker:
    """A loaded model behind a server that is not started yet."""

    server: AttentionServer
    experts: LocalExperts | RemoteExperts
    grammars: GrammarMasker
    description: pb.DescribeResponse

    def stop(self, grace_s: float) -> None:
        """Ends streams and expert calls: the step in hand may finish within the grace."""
        if not self.server.stop(grace_s):
            logger.warning("a step was still running after %.1f s", grace_s)
        self.experts.close()
        self.grammars.close()


def build_worker(settings: AttentionWorkerSettings) -> AttentionWorker:
    """Loads everything and warms it up; may take minutes.

    Raises:
        StartupError: The settings cannot work, the checkpoint cannot be served, or the kernels do
            not compute what they must on this machine.
    """
    checkpoint = Checkpoint.open(Path(settings.model))
    config = checkpoint.config
    loaded = load_and_warm_up(settings, checkpoint)
    model, kv, pool = loaded.model, loaded.kv, loaded.pool
    grammars = GrammarMasker(checkpoint.tokenizer_path, config.eos_token_ids, config.vocab_size)
    grammars.prepare()
    state = PagedKvState(kv, pool.max_num_seqs, pool.max_model_len)
    splitter = SplitByTimes() if settings.overlap else NeverSplit()
    runner = ModelRunner(model, loaded.experts, state, _limits(settings), grammars, splitter)
    description = _description(settings, checkpoint, runner, _dtype_name(settings, config))
    description.numerics_fingerprint = loaded.fingerprint
    servicer = AttentionServicer(description, runner, loaded.map_user)
    server = AttentionServer(servicer, settings.socket_path)
    return AttentionWorker(server, loaded.experts, grammars, description)


@dataclass(frozen=True)
class LoadedModel:
    """What computes, with all kernels compiled."""

    model: Model
    experts: LocalExperts | RemoteExperts
    map_user: MapUser
    kv: PagedKvCache
    pool: KvPoolSettings
    fingerprint: bytes
    """Of the numerics of the device."""


def load_and_warm_up(settings: AttentionWorkerSettings, checkpoint: Checkpoint) -> LoadedModel:
    """Loads weights and runs every kernel once.

    Raises:
        StartupError: See `build_worker`.
    """
    config = checkpoint.config
    check_kv_cache(settings, config)  # refused before anything is compiled
    dtype_name = _dtype_name(settings, config)
    torch.set_num_threads(1)  # the kernels have their own team; a second pool would take cores
    start_team(threads_of_environment() or 1)
    dtype, device = TORCH_DTYPES[dtype_name], find_device(settings.device)
    pool = _kv_pool_settings(settings, _max_model_len(settings, config))
    weight_bytes = _weight_bytes(settings, checkpoint, dtype_name)
    num_kv_blocks = choose_num_kv_blocks(
        config, pool, dtype, available_memory(device) - weight_bytes
    )
    fingerprint = _self_test(dtype_name, device)
    model = load_model(checkpoint, dtype, device, pool.max_model_len)
    experts, map_user, stand_in = _experts(settings, checkpoint, dtype_name)
    kv = PagedKvCache(config, num_kv_blocks, pool.block_size, dtype, device, int8=pool.int8)
    warm_up(model, kv, stand_in)
    return LoadedModel(model, experts, map_user, kv, pool, fingerprint)


def _self_test(dtype: DtypeName, device: torch.device) -> bytes:
    """Fingerprint of this device's numerics, which other processes are compared with."""
    try:
        return numerics_fingerprint(dtype, device)
    except RuntimeError as error:
        raise StartupError(f"the kernels do not work on this machine: {error}") from error


def _dtype_name(settings: AttentionWorkerSettings, config: ModelConfig) -> DtypeName:
    return config.dtype if settings.dtype == "auto" else settings.dtype


def _max_model_len(settings: AttentionWorkerSettings, config: ModelConfig) -> int:
    """As asked for, within what the model was trained for."""
    trained = config.max_position_embeddings
    asked = settings.max_model_len
    if asked is not None and asked > trained:
        raise SettingsError(
            f"max_model_len is {asked}, but the model was trained for {trained} tokens",
            fix=f"use --max-model-len {trained} or less",
        )
    return asked or trained


def _experts(
    settings: AttentionWorkerSettings, checkpoint: Checkpoint, dtype: DtypeName
) -> tuple[LocalExperts | RemoteExperts, MapUser, ExpertClient]:
    """All experts in this process, or the client of the expert workers; who follows the expert map;
    and what stands in for the experts while others are not known."""
    config, fingerprint = checkpoint.config, checkpoint.fingerprint
    if not settings.colocated:
        how = _wire_dtype(settings, dtype), settings.device
        degraded = settings.allow_degraded
        remote = RemoteExperts(
            *(config, fingerprint, dtype, *how),
            allow_degraded=degraded,
            transport=make_transport(settings.tls.tls_files),
        )
        remote.warm_up()
        return remote, remote, ZeroExperts(config, fingerprint, dtype, *how)
    store = ExpertStore(checkpoint, dtype, settings.device, expert_dtype=settings.expert_dtype)
    for layer in config.moe_layers:
        for expert in range(config.moe_ffn(layer).num_experts):
            store.load(layer, expert)
    local = LocalExperts(store)
    return local, NoMapUser(), local


def _wire_dtype(settings: AttentionWorkerSettings, dtype: DtypeName) -> WireDtype:
    """How hidden states travel, which is never wider than they are."""
    asked: WireDtype = dtype if settings.wire_dtype == "auto" else settings.wire_dtype
    if asked not in wire_dtypes(dtype):
        raise SettingsError(
            f"wire_dtype is {asked}, but the model is served in {dtype}",
            fix=f"use auto or one of {', '.join(wire_dtypes(dtype))}",
        )
    return asked


def check_kv_cache(settings: AttentionWorkerSettings, config: ModelConfig) -> None:
    """Raises SettingsError if no kernel takes keys and values held so."""
    if settings.engine.kv_cache_dtype == "auto":
        return
    why = ""
    if settings.device != "cpu":
        why = f"the device is {settings.device}, and only kernels for cpu take it"
    elif any(isinstance(layer.attention, MlaConfig) for layer in config.layers):
        why = "the model has latent attention, which cannot be held so"
    if why:
        asked = settings.engine.kv_cache_dtype
        raise SettingsError(
            f"kv_cache_dtype is {asked}, but {why}", fix="use --kv-cache-dtype auto"
        )


def _kv_pool_settings(settings: AttentionWorkerSettings, max_model_len: int) -> KvPoolSettings:
    engine = settings.engine
    return KvPoolSettings(
        block_size=engine.kv_block_size,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=max_model_len,
        max_step_tokens=engine.max_num_batched_tokens,
        cache_tokens=engine.kv_cache_tokens,
        memory_fraction=engine.kv_memory_fraction,
        int8=engine.kv_cache_dtype == "int8",
    )


def _weight_bytes(
    settings: AttentionWorkerSettings, checkpoint: Checkpoint, dtype: DtypeName
) -> int:
    """Memory that weights will take, so that the pool's size is known before they are loaded."""
    config, itemsize = checkpoint.config, TORCH_DTYPES[dtype].itemsize
    size = model_size(config)
    plan = plan_experts(checkpoint, settings.expert_dtype, dtype)
    experts = plan.all_experts_nbytes(config, itemsize) if settings.colocated else 0
    return attention_worker_nbytes(config, size, itemsize) + experts


def _limits(settings: AttentionWorkerSettings) -> RunnerLimits:
    return RunnerLimits(
        num_request_slots=settings.engine.max_num_seqs,
        max_step_tokens=settings.engine.max_num_batched_tokens,
        expert_call_timeout_s=settings.engine.expert_call_timeout_s,
        speculation=Speculation(
            num_tokens=settings.engine.num_speculative_tokens,
            lookup_max=settings.engine.prompt_lookup_max,
            lookup_min=settings.engine.prompt_lookup_min,
        ),
    )


def _description(
    settings: AttentionWorkerSettings,
    checkpoint: Checkpoint,
    runner: ModelRunner,
    dtype: DtypeName,
) -> pb.DescribeResponse:
    config = checkpoint.config
    return pb.DescribeResponse(
        incarnation=incarnation(),
        protocol_revision=PROTOCOL_REVISION,
        model=expert_service_pb2.ModelIdentity(
            fingerprint=checkpoint.fingerprint,
            name=checkpoint.name,
            num_layers=config.num_layers,
            num_experts=config.num_experts,
            hidden_size=config.hidden_size,
            dtype=DTYPE_CODES[dtype],
        ),
        device=settings.device,
        num_kv_blocks=runner.state.kv.num_blocks,
        kv_block_size=runner.state.kv.block_size,
        kv_block_bytes=runner.state.kv.block_bytes,
        kv_groups=[
            pb.KvGroup(sliding_window=window or 0) for window in runner.state.kv.sliding_windows
        ],
        num_request_slots=runner.limits.num_request_slots,
        max_step_tokens=runner.limits.max_step_tokens,
        max_model_len=runner.model.max_model_len,
        colocated=settings.colocated,
    )
