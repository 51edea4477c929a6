"""What people see in the terminal: progress, the answer to the first question, the ready block."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from expertmesh.errors import ExpertMeshError
from expertmesh.processes import write_error
from expertmesh.settings import GatewaySettings
from gateway.command.launcher_probe import ReadyProbe, context_for_own_gateway, http_port
from gateway.command.launcher_supervisor import Member

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from expertmesh.model_tools.progress import Progress

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 5.0
_MAX_ANSWER_TOKENS = 128


@contextlib.contextmanager
def make_progress() -> Iterator[Progress]:
    """A bar on a terminal, a line every few seconds elsewhere; both on standard error."""
    if not sys.stderr.isatty():
        yield LogProgress()
        return
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    bars = rich_progress.Progress(*columns, console=Console(stderr=True))
    try:
        yield TerminalProgress(bars)
    finally:
        bars.stop()


class TerminalProgress:
    """One bar a stage.

    Args:
        bars: Where they are drawn; started with the first stage.
    """

    def __init__(self, bars: RichProgress) -> None:
        self._bars = bars
        self._task: TaskID | None = None

    def stage(self, name: str, total: int) -> None:
        """Begins a stage of `total` bytes; 0 if the size is not known."""
        self.done()
        self._bars.start()
        self._task = self._bars.add_task(name, total=total or None)

    def advance(self, count: int) -> None:
        """Adds bytes to the current stage."""
        if self._task is not None:
            self._bars.advance(self._task, count)

    def done(self) -> None:
        """Ends the last stage: its bar is full."""
        if self._task is not None:
            done = self._bars.tasks[-1].completed
            self._bars.update(self._task, total=done, completed=done)
            self._task = None


class LogProgress:
    """A line at the beginning of a stage, and every few seconds with the share that is done."""

    def __init__(self) -> None:
        self._name = ""
        self._total = 0
        self._done = 0
        self._next_line_s = 0.0

    def stage(self, name: str, total: int) -> None:
        """Begins a stage of `total` bytes; 0 if the size is not known."""
        self._name, self._total, self._done = name, total, 0
        self._next_line_s = time.monotonic() + _LOG_EVERY_S
        self._write("begins")

    def advance(self, count: int) -> None:
        """Adds bytes to the current stage."""
        self._done += count
        if time.monotonic() >= self._next_line_s:
            self._next_line_s = time.monotonic() + _LOG_EVERY_S
            share = f" ({100 * self._done // self._total} %)" if self._total else ""
            self._write(f"{self._done / 1e6:.0f} MB{share}")

    def done(self) -> None:
        """Ends the last stage."""
        self._write("done")

    def _write(self, what: str) -> None:
        sys.stderr.write(f"{self._name}: {what}\n")
        sys.stderr.flush()


@dataclasses.dataclass(frozen=True)
class ReadyBlock:
    """What one needs to know about a server that has just become ready."""

    http_url: str
    grpc_address: str
    model: str
    folder: str
    processes: dict[str, int]
    """Name to process id."""
    kv_cache: str
    experts: str

    @classmethod
    def of(
        cls,
        settings: GatewaySettings,
        members: Sequence[Member],
        probe: ReadyProbe,
        num_pairs: int,
    ) -> ReadyBlock:
        """Collects it from the settings and the ready lines.

        Args:
            settings: Of the gateway.
            members: Gateway first.
            probe: After /ready was 200.
            num_pairs: (layer, expert) pairs of the model.
        """
        info = members[0].info or {}
        host = f"[{probe.host}]" if ":" in probe.host else probe.host
        return cls(
            http_url=f"{probe.scheme}://{host}:{http_port(info)}",
            grpc_address=f"{host}:{info.get('grpc_port')}",
            model=settings.model.served_model_name or settings.model.model,
            folder=settings.model.model,
            processes=_processes(members),
            kv_cache=_kv_cache(settings, info.get("kv_cache_tokens")),
            experts=_experts(settings, num_pairs, probe.num_uncovered),
        )

    def rows(self) -> list[tuple[str, str]]:
        """Labels and values, in the order to show them."""
        processes = ", ".join(f"{name} {pid}" for name, pid in self.processes.items())
        return [
            ("HTTP", f"{self.http_url}/v1"),
            ("gRPC", self.grpc_address),
            ("metrics", f"{self.http_url}/metrics"),
            ("model", f"{self.model} ({self.folder})"),
            ("processes", processes),
            ("KV cache", self.kv_cache),
            ("experts", self.experts),
        ]


def print_ready_block(block: ReadyBlock) -> None:
    """Writes the block to standard output: framed on a terminal, plain lines elsewhere."""
    if not sys.stdout.isatty():
        lines = [f"{label:<10} {value}" for label, value in block.rows()]
        sys.stdout.write("\n".join(["ExpertMesh is ready", *lines]) + "\n")
        sys.stdout.flush()
        return
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for label, value in block.rows():
        table.add_row(Text(label, style="bold"), Text(value))  # a path may look like markup
    footer = "Ctrl-C stops everything"
    Console().print(Panel(table, title="ExpertMesh is ready", subtitle=footer, expand=False))


def print_answer(http_url: str, question: str, api_key: str | None) -> None:
    """Streams the model's answer to standard output; an error is written, not raised."""
    from gateway.command.client_commands import ClientOptions, answer

    sys.stdout.write(f"\n> {question}\n")
    options = ClientOptions(
        http_url,
        max_tokens=_MAX_ANSWER_TOKENS,
        temperature=0.0,
        api_key=api_key,
        context=context_for_own_gateway(),
    )
    try:
        answer([{"role": "user", "content": question}], options)
    except ExpertMeshError as error:
        write_error(error)
    sys.stdout.write("\n")
    sys.stdout.flush()


def _processes(members: Sequence[Member]) -> dict[str, int]:
    processes = {member.name: member.child.pid for member in members if member.child is not None}
    pids = (members[0].info or {}).get("attention_worker_pids")
    for index, pid in enumerate(pids if isinstance(pids, list) else ()):
        processes[f"attention worker {index}"] = pid
    return processes


def _kv_cache(settings: GatewaySettings, num_tokens: object) -> str:
    count = settings.mesh.attention_workers
    return f"{num_tokens} tokens" if count == 1 else f"{count} x {num_tokens} tokens"


def _experts(settings: GatewaySettings, num_pairs: int, num_uncovered: int) -> str:
    if not num_pairs:
        return "none: a dense model"
    where = ", in the attention worker" if settings.mesh.colocated else ""
    return f"{num_pairs - num_uncovered}/{num_pairs} covered{where}"
