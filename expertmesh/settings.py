"""Settings of every process: frozen dataclasses, one a topic, and the only place with defaults.

The command line reads its defaults and help from here, and a process hands settings to its
children as JSON (`to_json`, `from_json`). A value out of range raises `SettingsError`, which names
the setting, the value and what was expected. Only the standard library and `expertmesh.errors` are
imported, so that `--help` stays quick.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from expertmesh.errors import SettingsError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
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


class Settings:
    """Base of the settings classes: JSON in both directions, strict."""

    def to_json(self) -> str:
        """One line of JSON with every field."""
        return json.dumps(dataclasses.asdict(typing.cast("typing.Any", self)))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of `to_json`. Raises SettingsError for unknown keys and wrong types."""
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise SettingsError(f"settings are not JSON: {error}") from error
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: object, where: str = "") -> Self:
        """Settings of parsed JSON or YAML; absent keys take their default.

        Args:
            raw: A mapping with the names of the fields as keys.
            where: Dotted path of `raw`, for error messages.
        """
        value = _convert(raw, cls, where)
        assert isinstance(value, cls)
        return value


@dataclass(frozen=True)
class LogSettings(Settings):
    """What a process writes to standard error."""

    log_level: LogLevel = "info"
    """Least severe level that is written."""
    log_format: LogFormat = "auto"
    """text for people, json for log collectors; auto is text on a terminal, json elsewhere."""


@dataclass(frozen=True)
class HttpSettings(Settings):
    """Where the public APIs listen."""

    host: str = "127.0.0.1"
    """Address to bind. The default is reachable from this machine only; elsewhere, use API keys."""
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
        _check_host(self.host)
        _check_port("port", self.port)
        _check_port("grpc_port", self.grpc_port)
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
    max_model_len: int | None = None
    """Most tokens of prompt and output together; by default what the model was trained for."""
    served_model_name: str | None = None
    """Name of the model in the APIs; by default the name of the checkpoint folder."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        if self.max_model_len is not None:
            _check_int("max_model_len", self.max_model_len, 1, 2**24)


@dataclass(frozen=True)
class ModelSettings(ModelOptions):
    """Which model is served, and how."""

    model: str = "demo"
    """Checkpoint folder in Hugging Face layout, or demo, demo-plain, demo-dense."""


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
        _check_int("max_num_seqs", self.max_num_seqs, 1, 65_536)
        _check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**20)
        _check_int("kv_block_size", self.kv_block_size, 1, 1024)
        if self.kv_cache_tokens is not None:
            _check_int("kv_cache_tokens", self.kv_cache_tokens, self.kv_block_size, 2**32)
        _check_float("kv_memory_fraction", self.kv_memory_fraction, 0.001, 0.95)
        if self.long_prefill_tokens is not None:
            _check_int("long_prefill_tokens", self.long_prefill_tokens, 1, 2**20)
        _check_int("num_speculative_tokens", self.num_speculative_tokens, 0, 64)
        _check_int("prompt_lookup_max", self.prompt_lookup_max, 1, 64)
        _check_int("prompt_lookup_min", self.prompt_lookup_min, 1, self.prompt_lookup_max)
        _check_float("request_timeout_s", self.request_timeout_s, 0.01, 864_000.0)
        _check_int("max_num_queued_reqs", self.max_num_queued_reqs, 0, 2**20)
        _check_int("max_num_queued_tokens", self.max_num_queued_tokens, 1, 2**32)
        for name in ("priority_step_s", "experts_hold_s", "drain_grace_s"):
            _check_float(name, getattr(self, name), 0.0, 86_400.0)
        for name in ("expert_call_timeout_s", "step_timeout_s", "startup_timeout_s"):
            _check_float(name, getattr(self, name), 0.01, 86_400.0)


@dataclass(frozen=True)
class MeshSettings(Settings):
    """Where the experts are."""

    experts: str = ""
    """local: inside the attention worker; host:port,...: expert workers that run already; empty:
    `serve` starts its own."""
    expert_workers: int = 2
    """Expert workers that `serve` starts; they share the experts evenly."""
    attention_workers: int = 1
    """Attention workers of the gateway, each with its own KV cache; requests go where their prefix
    is cached or least is to be done."""

    def __post_init__(self) -> None:
        """Checks the ranges and the addresses."""
        _check_int("expert_workers", self.expert_workers, 1, 256)
        _check_int("attention_workers", self.attention_workers, 1, 64)
        _ = self.addresses

    @property
    def colocated(self) -> bool:
        """True if the experts are inside the attention worker."""
        return self.experts == LOCAL_EXPERTS

    @property
    def addresses(self) -> tuple[str, ...]:
        """host:port of each expert worker named in `experts`, in order, each once."""
        if self.colocated or not self.experts:
            return ()
        named = tuple(part.strip() for part in self.experts.split(","))
        for address in named:
            split_address("experts", address)
        if len(set(named)) != len(named):
            raise SettingsError(f"experts names an address twice: {self.experts!r}")
        return named


@dataclass(frozen=True)
class GatewaySettings(Settings):
    """Everything that a gateway needs."""

    http: HttpSettings = field(default_factory=HttpSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    mesh: MeshSettings = field(default_factory=MeshSettings)
    log: LogSettings = field(default_factory=LogSettings)


@dataclass(frozen=True)
class ExpertWorkerOptions(Settings):
    """How an expert worker serves, whatever the model."""

    host: str = "127.0.0.1"
    """Address to bind. There is no authentication: bind only to a network that you trust."""
    port: int = 50061
    """Port of the ExpertService; 0 picks a free one and prints it."""
    experts: str = "all"
    """Experts of every MoE layer to load at start: all, none, i/n (the i-th of n equal shares,
    from 0), or ids such as 0-3,6."""
    dtype: Dtype = "auto"
    """Type of weights and activations; auto is the checkpoint's own."""
    device: str = "cpu"
    """Device of the weights, as torch names it."""
    worker_id: str | None = None
    """Name in logs and status; by default host name and port (process id where the port is 0)."""
    max_streams: int = 16
    """Attention workers that may be connected at a time."""
    row_credits: int = 4096
    """Token rows that one attention worker may have in flight here; bounds the memory."""
    drain_grace_s: float = 1.0
    """Seconds for calls in flight when the process is told to stop."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        _check_host(self.host)
        _check_port("port", self.port)
        _check_int("max_streams", self.max_streams, 1, 4096)
        _check_int("row_credits", self.row_credits, 1, 2**24)
        _check_float("drain_grace_s", self.drain_grace_s, 0.0, 3600.0)


@dataclass(frozen=True)
class ExpertWorkerSettings(ExpertWorkerOptions):
    """Everything that an expert worker needs."""

    model: str = "demo"
    """Checkpoint folder in Hugging Face layout, or demo, demo-plain, demo-dense."""
    log: LogSettings = field(default_factory=LogSettings)


@dataclass(frozen=True)
class AttentionWorkerSettings(Settings):
    """Everything that an attention worker needs; its gateway fills this in."""

    model: str = "demo"
    """Checkpoint folder in Hugging Face layout."""
    socket_path: str = ""
    """Unix socket to serve on, in a folder that only the gateway can enter."""
    dtype: Dtype = "auto"
    """Type of weights and activations; auto is the checkpoint's own."""
    device: str = "cpu"
    """Device of weights and KV cache, as torch names it."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together; by default what the model was trained for."""
    colocated: bool = False
    """Experts are loaded into this process; no expert worker is called."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    """Limits, shared with the scheduler."""
    log: LogSettings = field(default_factory=LogSettings)


def split_address(name: str, address: str) -> tuple[str, int]:
    """Host and port of `host:port` (`[host]:port` for IPv6). Raises SettingsError.

    Args:
        name: The setting, for the message.
        address: What to split.
    """
    host, colon, port = address.rpartition(":")
    if colon and host and port.isascii() and port.isdigit() and 1 <= int(port) <= 65_535:
        return host.removeprefix("[").removesuffix("]"), int(port)
    raise SettingsError(f"{name} has {address!r}, expected host:port with a port of 1 to 65535")


def _check_host(value: str) -> None:
    """An empty variable of the environment must not open a server to every network."""
    if not value.strip() or value.startswith("["):
        raise SettingsError(
            f"host is {value!r}, expected a name or an address without brackets",
            fix="use 127.0.0.1 for this machine only, 0.0.0.0 or :: for every network",
        )


def _check_port(name: str, value: int) -> None:
    _check_int(name, value, 0, 65_535)


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise SettingsError(f"{name} is {value}, expected a whole number from {low} to {high}")


def _check_float(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise SettingsError(f"{name} is {value}, expected a number from {low:g} to {high:g}")


def _convert(raw: object, kind: object, where: str) -> object:
    """`raw` as `kind`: a settings class, a scalar, a Literal, or one of these or None."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _convert_dataclass(raw, kind, where)
    origin = typing.get_origin(kind)
    if origin is Literal:
        if raw in typing.get_args(kind):
            return raw
        choices = ", ".join(str(choice) for choice in typing.get_args(kind))
        raise SettingsError(f"{where} is {raw!r}, expected one of {choices}")
    if origin in (types.UnionType, typing.Union):
        options = [option for option in typing.get_args(kind) if option is not types.NoneType]
        return None if raw is None else _convert(raw, options[0], where)
    return _convert_scalar(raw, kind, where)


def _convert_dataclass(raw: object, kind: type, where: str) -> object:
    if not isinstance(raw, dict):
        raise SettingsError(f"{where or 'settings'} is {raw!r}, expected keys and values")
    kinds = typing.get_type_hints(kind)
    known = [entry.name for entry in dataclasses.fields(kind)]
    for key in raw:
        if key not in known:
            raise SettingsError(
                f"unknown setting {_join(where, str(key))}", fix=f"known are {', '.join(known)}"
            )
    return kind(**{key: _convert(raw[key], kinds[key], _join(where, key)) for key in raw})


def _convert_scalar(raw: object, kind: object, where: str) -> object:
    if kind is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if isinstance(kind, type) and type(raw) is kind:
        return raw
    name = getattr(kind, "__name__", str(kind))
    raise SettingsError(f"{where} is {raw!r}, expected {_KIND_NAMES.get(name, name)}")


_KIND_NAMES = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
