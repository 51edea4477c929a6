"""`expertmesh serve`: gateway, attention worker and expert workers on this machine.

Order: refuse a port in use, find or build the model, start expert workers and gateway side by
side, wait until every expert is covered, prove it with a question if one is given, print where
everything is, and stay until Ctrl-C.

The main thread does all of it. SIGINT and SIGTERM raise `_Stop` there, which ends whatever it does
and stops the children; a second signal kills them at once. Children hold a lifeline, so that they
end even if this process is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from expertmesh.cores import CoreShare, share_cores, usable_cores
from expertmesh.errors import PortError, SettingsError
from expertmesh.host_memory import available_host_memory
from expertmesh.leader_lock import FileLock
from expertmesh.logs import configure_logging
from expertmesh.processes import (
    LIFELINE_FD,
    READY_FD,
    Child,
    announce_ready,
    child_environment,
    spawn_module,
    watch_lifeline,
)
from expertmesh.settings import (
    ExpertWorkerOptions,
    GatewaySettings,
    HttpSettings,
    LogSettings,
    data_home,
)
from expertmesh.stop_request import keep_for_later
from gateway.api_keys import GivenKeys
from gateway.command.launcher_console import (
    ReadyBlock,
    make_progress,
    print_answer,
    print_ready_block,
)
from gateway.command.launcher_probe import ReadyProbe
from gateway.command.launcher_supervisor import Member, Supervisor
from gateway.placement.lock_path import lock_path

if TYPE_CHECKING:
    from expertmesh.model_config import ModelConfig

logger = logging.getLogger(__name__)

WORKER_HOST = "127.0.0.1"
_KILLED = 130
_EXPERT_MEMORY_SHARE = 0.6
"""Of free memory for experts; the rest is for keys and values, and for calls."""
RESTART_NICENESS = 10
"""Of expert workers that come back: the others serve meanwhile, on the same cores."""


class _Stop(BaseException):
    """SIGINT or SIGTERM arrived."""


def serve_model(settings: GatewaySettings, *, ask: str | None, keys: GivenKeys) -> int:
    """Serves until it is told to stop; returns the exit code.

    Args:
        settings: As for a gateway; `mesh` says which expert workers to start.
        ask: A question to answer on the terminal once ready.
        keys: That the gateway accepts; none: everybody is served.

    Raises:
        StartupError: Something could not start, or the gateway ended.
    """
    configure_logging(settings.log, "serve")
    watch_lifeline(lambda: os.kill(os.getpid(), signal.SIGTERM))
    check_ports(settings.http)
    found = find_model(settings)
    settings = found.settings
    with contextlib.ExitStack() as stack:
        mesh = LocalMesh.plan(found, stack, keys)
        supervisor = Supervisor(mesh.members, startup_timeout_s=settings.engine.startup_timeout_s)
        try:
            with _signals_stop(supervisor):
                _run(mesh, supervisor, ask)
        except _Stop:
            logger.info("stopping")
        finally:
            supervisor.stop(grace_s=settings.engine.drain_grace_s + 1.5)
    return 0


@dataclasses.dataclass(frozen=True)
class LocalMesh:
    """What `serve` starts."""

    settings: GatewaySettings
    """Of the gateway, with the addresses of the expert workers."""
    members: tuple[Member, ...]
    """Gateway first: it is stopped first."""
    num_pairs: int
    """(layer, expert) pairs of the model."""
    api_key: str | None = dataclasses.field(default=None, repr=False)
    """For our own question."""

    @classmethod
    def plan(cls, found: FoundModel, stack: contextlib.ExitStack, keys: GivenKeys) -> LocalMesh:
        """Decides on expert workers, their ports, cores and memory; starts nothing.

        Args:
            found: The model and the settings.
            stack: Holds the reserved ports and the lock file until everything has stopped.
            keys: That the gateway accepts.
        """
        settings, config = found.settings, found.config
        num_pairs = len(config.moe_layers) * config.num_experts
        count = _num_expert_workers(settings, config.num_experts)
        ports = [stack.enter_context(reserve_port(WORKER_HOST)) for _ in range(count)]
        addresses = ",".join(f"{WORKER_HOST}:{port}" for port in ports)
        experts = settings.mesh.experts if num_pairs else "local"
        mesh = dataclasses.replace(
            settings.mesh,
            experts=addresses or experts,
            overlap=settings.mesh.overlap and not addresses,
        )
        settings = dataclasses.replace(settings, mesh=mesh)
        if addresses and not mesh.leader_lock:
            stack.callback(lock_path(FileLock(), addresses).unlink, missing_ok=True)
        workers = _expert_workers(settings, ports, found.slots_of_each(count))
        members = (_gateway(settings, keys), *workers)
        return cls(settings, members, num_pairs, keys.api[0] if keys.api else None)

    @property
    def gateway_info(self) -> dict[str, object]:
        """Ready line of the gateway."""
        return self.members[0].info or {}


@dataclasses.dataclass(frozen=True)
class FoundModel:
    """A model that can be served."""

    settings: GatewaySettings
    """With the model's folder in place of its name."""
    config: ModelConfig
    expert_nbytes: int
    """Bytes of one expert in memory."""

    def slots_of_each(self, num_workers: int) -> int:
        """Experts that each of some expert workers on this machine has room for, all together as
        many as the model has at least."""
        num_pairs = len(self.config.moe_layers) * self.config.num_experts
        share = available_host_memory() * _EXPERT_MEMORY_SHARE / max(1, num_workers)
        least = -(-num_pairs // max(1, num_workers))
        return min(num_pairs, max(least, int(share / max(1, self.expert_nbytes))))


def find_model(settings: GatewaySettings) -> FoundModel:
    """Finds the model; builds a demo model if needed.

    The headers of all weights are checked here, so that a damaged model is refused before any
    process is started.

    Raises:
        CheckpointError: The model cannot be served.
        SettingsError: A setting does not fit the model.
    """
    from expertmesh.checkpoint import Checkpoint, name_of_folder
    from expertmesh.expert_plan import plan_experts
    from expertmesh.model_tools.resolve import DEMO_NAMES, resolve_model
    from expertmesh.safetensors_file import STORAGE

    name = settings.model.model
    with make_progress() as progress:
        folder = resolve_model(name, data_home(), progress).absolute()
    checkpoint = Checkpoint.open(folder)
    config = checkpoint.config
    _check_length(settings.model.max_model_len, config.max_position_embeddings)
    named = name if name in DEMO_NAMES else name_of_folder(folder)
    served = settings.model.served_model_name or named
    model = dataclasses.replace(settings.model, model=str(folder), served_model_name=served)
    dtype = config.dtype if model.dtype == "auto" else model.dtype
    experts = plan_experts(checkpoint, model.expert_dtype, dtype)
    nbytes = experts.expert_nbytes(config, STORAGE[dtype].itemsize)
    return FoundModel(dataclasses.replace(settings, model=model), config, nbytes)


def _check_length(asked: int | None, trained: int) -> None:
    if asked is not None and asked > trained:
        raise SettingsError(
            f"max_model_len is {asked}, but the model was trained for {trained} tokens",
            fix=f"use --max-model-len {trained} or less",
        )


def exec_expert_worker(model: str, options: ExpertWorkerOptions, log: LogSettings) -> int:
    """Becomes `python -m expert_worker`, with the environment that its kernels need.

    Returns only if that fails.
    """
    from expertmesh.model_tools.resolve import resolve_model

    check_port("port", options.host, options.port)
    with make_progress() as progress:
        folder = resolve_model(model, data_home(), progress)
    inherited = {name: os.environ[name] for name in (LIFELINE_FD, READY_FD) if name in os.environ}
    arguments = [str(folder), *_changed_flags(options), *_changed_flags(log)]
    argv = [sys.executable, "-m", "expert_worker", *arguments]
    keep_for_later()
    os.execve(sys.executable, argv, child_environment(inherited))
    return 1


def check_ports(http: HttpSettings) -> None:
    """Raises PortError if a port is in use, before anything slow is done."""
    check_port("port", http.host, http.port)
    check_port("grpc_port", http.host, http.grpc_port)


def check_port(name: str, host: str, port: int) -> None:
    """Raises PortError, which names the setting, if a port is in use; 0 never is."""
    if port:
        _bind(name, host, port).close()


@contextlib.contextmanager
def reserve_port(host: str) -> Iterator[int]:
    """A free port that only a child of ours will get: bound, but not listened on.

    With SO_REUSEADDR on both sides a child can bind and listen beside the reservation, and again
    after a restart, but the system gives the port to nobody else.
    """
    with _bind("port", host, 0) as reservation:
        yield int(reservation.getsockname()[1])


def _bind(name: str, host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        flag = name.replace("_", "-")
        raise PortError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            fix=f"stop what uses it, or choose another with --{flag} (0: any free port)",
        ) from error
    return bound


def _run(mesh: LocalMesh, supervisor: Supervisor, ask: str | None) -> None:
    """Starts, waits, tells, and watches. Ends by an exception only."""
    logger.info(
        "starting %s%s",
        ", ".join(member.name for member in supervisor.members),
        "" if _has_kernels() else "; the first start compiles kernels, which can take a minute",
    )
    supervisor.start()
    http = mesh.settings.http
    probe = ReadyProbe(
        http.host,
        timeout_s=mesh.settings.engine.startup_timeout_s,
        encrypted=bool(http.api_tls_cert_file),
    )
    supervisor.wait_until(lambda: probe.is_ready(mesh.gateway_info))
    block = ReadyBlock.of(mesh.settings, supervisor.members, probe, mesh.num_pairs)
    if ask:
        print_answer(block.http_url, ask, mesh.api_key)
    print_ready_block(block)
    announce_ready(mesh.gateway_info | {"processes": block.processes})
    supervisor.watch()


def _has_kernels() -> bool:
    """Whether compiled kernels were kept by an earlier start, as far as one can tell quickly."""
    folder = Path(child_environment()["NUMBA_CACHE_DIR"])
    return folder.is_dir() and any(folder.iterdir())


def _num_expert_workers(settings: GatewaySettings, num_experts: int) -> int:
    if settings.mesh.experts or not num_experts:
        return 0
    if settings.mesh.placement == "static" and settings.mesh.expert_workers > num_experts:
        raise SettingsError(
            f"expert_workers is {settings.mesh.expert_workers}, but the model has {num_experts}"
            " experts a layer, so that some would hold none",
            fix=f"use --expert-workers {num_experts} or fewer",
        )
    return settings.mesh.expert_workers


def _gateway(settings: GatewaySettings, keys: GivenKeys) -> Member:
    environment = child_environment(keys.to_environment())

    def start(on_exit: Callable[[Child], None]) -> Child:
        arguments = ["--settings", settings.to_json()]
        return spawn_module(
            "gateway", arguments, "gateway", environment=environment, on_exit=on_exit
        )

    return Member("gateway", start, restart=None)


def _expert_workers(
    settings: GatewaySettings, ports: Sequence[int], num_slots: int
) -> list[Member]:
    mesh = settings.mesh
    shares = share_cores(usable_cores(), len(ports), max_threads=mesh.threads, pin=mesh.pin_cores)
    return [
        _expert_worker(settings, index, ports, num_slots, share)
        for index, share in enumerate(shares)
    ]


def _expert_worker(
    settings: GatewaySettings,
    index: int,
    ports: Sequence[int],
    num_slots: int,
    share: CoreShare,
) -> Member:
    mesh = settings.mesh
    options = ExpertWorkerOptions(
        tls_cert_file=mesh.tls_cert_file,
        tls_key_file=mesh.tls_key_file,
        tls_ca_file=mesh.tls_ca_file,
        host=WORKER_HOST,
        port=ports[index],
        experts="none" if mesh.placement == "auto" else f"{index}/{len(ports)}",
        expert_slots=num_slots,
        dtype=settings.model.dtype,
        expert_dtype=settings.model.expert_dtype,
        worker_id=f"expert-worker-{index}",
        row_credits=max(ExpertWorkerOptions.row_credits, settings.engine.max_num_batched_tokens),
        threads=share.num_threads,
        cores=share.cores,
    )
    flags = [settings.model.model, *_changed_flags(options), *_changed_flags(settings.log)]
    name = f"expert worker {index}"

    def start(on_exit: Callable[[Child], None], *more_flags: str) -> Child:
        return spawn_module("expert_worker", [*flags, *more_flags], name, on_exit=on_exit)

    def restart(on_exit: Callable[[Child], None]) -> Child:
        return start(on_exit, "--start-niceness", str(RESTART_NICENESS))

    return Member(name, start, restart)


def _changed_flags(options: ExpertWorkerOptions | LogSettings) -> list[str]:
    """Flags for the fields that differ from their default."""
    flags = []
    for entry in dataclasses.fields(options):
        value = getattr(options, entry.name)
        flag = f"--{entry.name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value != entry.default:
            flags += [flag, str(value)]
    return flags


@contextlib.contextmanager
def _signals_stop(supervisor: Supervisor) -> Iterator[None]:
    """SIGINT and SIGTERM raise `_Stop`; the next one kills all children and ends the process."""

    def kill(_number: int, _frame: FrameType | None) -> None:
        supervisor.kill()
        os._exit(_KILLED)

    def stop(_number: int, _frame: FrameType | None) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, kill)
        raise _Stop

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    yield
