"""Settings of every process: frozen dataclasses, one a topic, and the only place with defaults.

The command line reads its defaults and help from here, and a process hands settings to its
children as JSON (`to_json`, `from_json`). A value out of range raises `SettingsError`, which names
the setting, the value and what was expected. Nothing slow is imported: `--help` stays quick.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from expertmesh.cores import MAX_THREADS, parse_cores
from expertmesh.errors import SettingsError
from expertmesh.expert_source import AddressList, ExpertSource, parse_experts
from expertmesh.key_settings import KeyFiles
from expertmesh.leader_lock import FileLock, LeaseLock, parse_lock
from expertmesh.scaling_settings import ScalingSettings
from expertmesh.settings_base import Settings, check_float, check_host, check_int, check_port
from expertmesh.tls_settings import ApiTls, MeshTls, check_exposure

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
WireDtype = Literal["auto", "float32", "bfloat16", "float16", "int8"]
ExpertDtype = Literal["auto", "plain", "int8", "int4"]
KvCacheDtype = Literal["auto", "int8"]
PlacementMode = Literal["auto", "static"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "text", "json"]

_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\-\[\]:]+")

LOCAL_EXPERTS = "local"
"""Value of `MeshSettings.experts` for the colocated mode."""


def data_home() -> Path:
    """Folder for models and compiled kernels: `EXPERTMESH_HOME`, else under the user's cache."""
    if home := os.environ.get("EXPERTMESH_HOME"):
        return Path(home).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache").absolute() / "expertmesh"


@dataclass(frozen=True)
class LogSettings(Settings):
    """What a process writes to standard error."""

    log_level: LogLevel = "info"
    """Least severe level that is written."""
    log_format: LogFormat = "auto"
    """text for people, json for log collectors; auto is text on a terminal, json elsewhere."""


@dataclass(frozen=True)
class HttpSettings(ApiTls):
    """Where the public APIs listen."""

    host: str = "127.0.0.1"
    """Address to bind. The default is reachable from this machine only; elsewhere, use API keys,
    and TLS or `insecure`."""
    insecure: bool = False
    """Plain text on `host`, whoever can reach it: behind a proxy that ends TLS, or on a network
    that you trust."""
    port: int = 8000
    """Port of the OpenAI HTTP API and of /metrics; 0 picks a free one and prints it."""
    grpc_port: int = 50051
    """Port of the gRPC API; 0 picks a free one and prints it."""
    require_model: bool = False
    """Refuse requests that do not name the model."""
    allowed_origins: str = ""
    """Origins of web pages that may call the HTTP API from a browser, separated by commas; * allows
    all."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        check_host(self.host)
        check_exposure(
            self.host,
            encrypted=bool(self.api_tls_cert_file),
            insecure=self.insecure,
            fix="use --api-tls-cert-file and --api-tls-key-file",
        )
        check_port("port", self.port)
        check_port("grpc_port", self.grpc_port)
        for origin in self.origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise SettingsError(
                    f"allowed_origins has {origin!r}, expected such as https://chat.example or *"
                )

    @property
    def origins(self) -> tuple[str, ...]:
        """The allowed origins, one by one."""
        return tuple(filter(None, (part.strip() for part in self.allowed_origins.split(","))))


@dataclass(frozen=True)
class ModelOptions(Settings):
    """How a model is served, whichever it is."""

    dtype: Dtype = "auto"
    """Type of weights and activations; auto is the checkpoint's own."""
    expert_dtype: ExpertDtype = "auto"
    """Weights of routed experts in memory: int8 (a scale per channel) and int4 (per group of 32)
    quantise those of an unquantised checkpoint; plain expands quantised ones to `dtype`; auto keeps
    what the checkpoint has."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together; by default what the model was trained for."""
    served_model_name: str | None = None
    """Name of the model in the APIs; by default the name of the checkpoint folder."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        if self.max_model_len is not None:
            check_int("max_model_len", self.max_model_len, 1, 2**24)


@dataclass(frozen=True)
class ModelSettings(ModelOptions):
    """Which model is served, and how."""

    model: str = "demo"
    """Checkpoint folder in Hugging Face layout, ORGANISATION/NAME[@REVISION] of the hub, or demo,
    demo-plain, demo-dense."""


@dataclass(frozen=True)
class EngineSettings(Settings):
    """Limits of the scheduler and of the attention worker."""

    max_num_seqs: int = 64
    """Requests that run at a time: request slots of the attention worker."""
    max_num_batched_tokens: int = 512
    """Tokens of one step; a longer prompt is computed in chunks, each in a step with others."""
    kv_block_size: int = 16
    """Tokens of one KV block."""
    kv_cache_tokens: int | None = None
    """Tokens that the KV cache holds; by default what `kv_memory_fraction` allows."""
    kv_memory_fraction: float = 0.25
    """Share of the device's free memory for the KV cache, where `kv_cache_tokens` is not given."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """Keys and values in the KV cache: auto is the model's own type, int8 with a scale per token
    and head takes about half the memory of bfloat16 at the cost of accuracy; CPU, no latents."""
    prefix_caching: bool = True
    """KV blocks of earlier requests are used again for prompts that begin alike."""
    async_scheduling: bool = True
    """The next step is sent while one is computed; never done with speculative tokens."""
    long_prefill_tokens: int | None = None
    """Most prompt tokens of one request in a step while others have work; by default half of
    `max_num_batched_tokens`."""
    priority_step_s: float = 10.0
    """A request of priority p is treated as if it had arrived p times this many seconds later, so
    that nobody waits for ever."""
    num_speculative_tokens: int = 0
    """Tokens that are proposed by looking for the latest ones in prompt and output, and verified in
    one step; 0 turns it off."""
    prompt_lookup_max: int = 4
    """Longest run of latest tokens that is looked for."""
    prompt_lookup_min: int = 2
    """Shortest run of latest tokens that is looked for."""
    request_timeout_s: float = 3600.0
    """Seconds from the arrival of a request to its end; after them it is answered 504."""
    max_num_queued_reqs: int = 256
    """Requests that wait for an attention worker at a time; more are answered 503."""
    max_num_queued_tokens: int = 262_144
    """Prompt tokens that wait for an attention worker at a time; more are answered 503."""
    experts_hold_s: float = 10.0
    """Seconds for which requests pause while an expert has no usable copy; then they end."""
    expert_call_timeout_s: float = 30.0
    """Seconds for one layer's call to the expert workers, retries included."""
    step_timeout_s: float = 120.0
    """Seconds for one step; after them the attention worker counts as hung."""
    startup_timeout_s: float = 300.0
    """Seconds for a child process to load its weights and compile its kernels."""
    drain_grace_s: float = 1.0
    """Seconds that running requests get to finish when the gateway is told to stop. Short, since
    `serve` promises to be gone 5 s after Ctrl-C; give more behind a load balancer."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        check_int("max_num_seqs", self.max_num_seqs, 1, 65_536)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**20)
        check_int("kv_block_size", self.kv_block_size, 1, 1024)
        if self.kv_cache_tokens is not None:
            check_int("kv_cache_tokens", self.kv_cache_tokens, self.kv_block_size, 2**32)
        check_float("kv_memory_fraction", self.kv_memory_fraction, 0.001, 0.95)
        if self.long_prefill_tokens is not None:
            check_int("long_prefill_tokens", self.long_prefill_tokens, 1, 2**20)
        check_int("num_speculative_tokens", self.num_speculative_tokens, 0, 64)
        check_int("prompt_lookup_max", self.prompt_lookup_max, 1, 64)
        check_int("prompt_lookup_min", self.prompt_lookup_min, 1, self.prompt_lookup_max)
        check_float("request_timeout_s", self.request_timeout_s, 0.01, 864_000.0)
        check_int("max_num_queued_reqs", self.max_num_queued_reqs, 0, 2**20)
        check_int("max_num_queued_tokens", self.max_num_queued_tokens, 1, 2**32)
        for name in ("priority_step_s", "experts_hold_s", "drain_grace_s"):
            check_float(name, getattr(self, name), 0.0, 86_400.0)
        for name in ("expert_call_timeout_s", "step_timeout_s", "startup_timeout_s"):
            check_float(name, getattr(self, name), 0.01, 86_400.0)


@dataclass(frozen=True)
class MeshOptions(MeshTls):
    """Where the experts are, and who decides it."""

    experts: str = ""
    """local: inside the attention worker; host:port,...: expert workers that run already;
    dns:NAME:PORT: at all addresses of a name; k8s:[NAMESPACE/]SERVICE[:PORTNAME]: the pods behind a
    Service of Kubernetes, whose port is called grpc unless named; empty: `serve` starts its own."""
    kubeconfig: str = ""
    """File that says how to reach Kubernetes, and in which namespace, for k8s: and lease:; by
    default as the gateway's pod may."""
    placement: PlacementMode = "auto"
    """auto: of the gateways that share expert workers one leads, and has experts loaded, copied and
    moved; static: expert workers hold what they were started with."""
    min_copies: int = 2
    """Copies of each expert on different expert workers, as far as memory allows: with one, the
    loss of an expert worker makes requests wait until its experts are loaded elsewhere."""
    move_mib_per_minute: int = 65_536
    """Most MiB of weights that are loaded in a minute for balance and further copies; experts
    without any copy are loaded at once."""
    leader_lock: str = ""
    """By what the gateways that share expert workers agree who leads: a file that they lock, by
    default one under EXPERTMESH_HOME, the same for the same `experts`; or lease:NAME, a Lease of
    Kubernetes in their namespace, by default expertmesh-leader with k8s:."""
    lease_duration_s: float = 15.0
    """Seconds after which a leader that has not renewed its Lease is followed by another; it leads
    no more after two thirds of them. The same for all gateways."""
    attention_workers: int = 1
    """Attention workers of the gateway, each with its own KV cache; requests go where their prefix
    is cached or least is to be done."""
    wire_dtype: WireDtype = "auto"
    """How hidden states travel to expert workers: auto is the model's own type, bfloat16 halves
    those of float32, int8 with a scale per row halves or quarters them at the cost of accuracy."""
    threads: int | None = None
    """Most threads of a worker's kernels; by default one for each core of its share."""
    overlap: bool = True
    """A step may be computed as two micro-batches in turn, while measured times say that it pays;
    `serve` does without for expert workers of its own, which compute on the same cores."""
    allow_degraded: bool = False
    """Experts that nobody holds are left out, and results are other ones then; by default requests
    wait for them. Counted in moe_dropped_pairs_total."""
    pin_cores: bool = True
    """Workers of one kind stay on cores of their own, so that they never wait for each other's
    threads; not done where a cgroup limits the time of the cores."""

    def __post_init__(self) -> None:
        """Checks the ranges and the addresses."""
        super().__post_init__()
        check_int("min_copies", self.min_copies, 1, 256)
        check_int("move_mib_per_minute", self.move_mib_per_minute, 1, 2**30)
        check_int("attention_workers", self.attention_workers, 1, 64)
        _check_threads(self.threads)
        check_float("lease_duration_s", self.lease_duration_s, 1.0, 3600.0)
        _ = self.lock
        if self.colocated and self.wire_dtype != "auto":
            raise SettingsError(
                f"wire_dtype is {self.wire_dtype}, but experts are local: no rows travel",
                fix="leave out --wire-dtype",
            )

    @property
    def colocated(self) -> bool:
        """True if the experts are inside the attention worker."""
        return self.experts == LOCAL_EXPERTS

    @property
    def expert_source(self) -> ExpertSource:
        """Where expert workers are looked for; an empty list if the experts are local."""
        return AddressList() if self.colocated else parse_experts(self.experts)

    @property
    def lock(self) -> FileLock | LeaseLock:
        """By which the gateways agree who leads."""
        return parse_lock(self.leader_lock, self.expert_source)


@dataclass(frozen=True)
class MeshSettings(MeshOptions):
    """All of that, and how many expert workers there are to be."""

    expert_workers: int = 2
    """Expert workers that `serve` starts."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        check_int("expert_workers", self.expert_workers, 1, 256)


@dataclass(frozen=True)
class GatewaySettings(Settings):
    """Everything that a gateway needs."""

    http: HttpSettings = field(default_factory=HttpSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    mesh: MeshSettings = field(default_factory=MeshSettings)
    scaling: ScalingSettings = field(default_factory=ScalingSettings)
    keys: KeyFiles = field(default_factory=KeyFiles)
    log: LogSettings = field(default_factory=LogSettings)


@dataclass(frozen=True)
class ExpertWorkerOptions(MeshTls):
    """How an expert worker serves, whatever the model."""

    host: str = "127.0.0.1"
    """Address to bind. Others than this machine may reach it only with TLS, or with `insecure`."""
    insecure: bool = False
    """Plain text on `host`, whoever can reach it: for a network that you trust."""
    port: int = 50061
    """Port of the ExpertService; 0 picks a free one and prints it."""
    experts: str = "all"
    """Experts of every MoE layer to load at start: all, none, i/n (the i-th of n equal shares,
    from 0), or ids such as 0-3,6."""
    expert_slots: int | None = None
    """Most experts held at a time, all layers together; by default as many as free memory has room
    for, at most all of the model. Experts can be loaded and unloaded while it serves."""
    dtype: Dtype = "auto"
    """Type of weights and activations; auto is the checkpoint's own."""
    expert_dtype: ExpertDtype = "auto"
    """Weights in memory: int8 (a scale per channel) and int4 (per group of 32) quantise those of an
    unquantised checkpoint; plain expands quantised ones to `dtype`; auto keeps what the checkpoint
    has. The gateway's has to be the same."""
    device: str = "cpu"
    """Device of the weights, as torch names it."""
    worker_id: str | None = None
    """Name in logs and status; by default host name and port (process id where the port is 0)."""
    node: str | None = None
    """Name of the machine, by default the host name: copies of an expert go to different ones."""
    max_streams: int = 16
    """Attention workers that may be connected at a time."""
    row_credits: int = 4096
    """Token rows that one attention worker may have in flight here; bounds the memory."""
    direct_port: int = 0
    """Port of direct connections: rows travel over plain TCP instead of gRPC, where attention
    workers can reach it; 0 picks a free one, -1 offers none."""
    health_port: int | None = None
    """Port of gRPC health checks without TLS, for an orchestrator: services startup, readiness and
    liveness; none by default."""
    health_host: str | None = None
    """Address to bind for health checks; by default that of the ExpertService."""
    drain_grace_s: float = 45.0
    """Most seconds from being told to stop to the end: for its experts to be loaded elsewhere, if a
    gateway sees to that, and for calls in flight. Without a gateway it ends at once."""
    threads: int | None = None
    """Threads of the kernels; by default one for each core that the process may use."""
    scrub_mib_per_s: int = 64
    """MiB a second of experts in memory that are looked at for changed bits; 0: none. CPU only."""
    cores: str = ""
    """Cores that the process stays on, such as 0-3,8; by default the system decides."""
    start_niceness: int = 0
    """How far the start stays behind other processes of the machine for the cores, 0 to 19: so that
    one that comes back does not slow down those that serve meanwhile."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        check_host(self.host)
        check_exposure(
            self.host,
            encrypted=self.tls_files is not None,
            insecure=self.insecure,
            fix="use --tls-cert-file, --tls-key-file and --tls-ca-file",
        )
        check_port("port", self.port)
        check_int("start_niceness", self.start_niceness, 0, 19)
        check_int("direct_port", self.direct_port, -1, 65_535)
        if self.health_port is not None:
            check_port("health_port", self.health_port)
        if self.health_host is not None:
            check_host(self.health_host)
        if self.expert_slots is not None:
            check_int("expert_slots", self.expert_slots, 1, 2**31)
        check_int("max_streams", self.max_streams, 1, 4096)
        check_int("row_credits", self.row_credits, 1, 2**24)
        check_float("drain_grace_s", self.drain_grace_s, 0.0, 3600.0)
        check_int("scrub_mib_per_s", self.scrub_mib_per_s, 0, 2**20)
        _check_threads(self.threads)
        parse_cores(self.cores)


@dataclass(frozen=True)
class ExpertWorkerSettings(ExpertWorkerOptions):
    """Everything that an expert worker needs."""

    model: str = "demo"
    """Checkpoint folder in Hugging Face layout, ORGANISATION/NAME[@REVISION] of the hub, or demo,
    demo-plain, demo-dense."""
    log: LogSettings = field(default_factory=LogSettings)


def _check_threads(threads: int | None) -> None:
    if threads is not None:
        check_int("threads", threads, 1, MAX_THREADS)
