"""Child processes that cannot outlive their parent, and the words parent and child exchange.

Parent side: `spawn` starts a child in a session of its own (Ctrl-C reaches the parent only, which
then stops its children in order), with two pipes:

    lifeline  parent holds the write end, never writes; the child reads until end of file, which
              comes when the parent is gone in whatever way, and then ends itself
    ready     child writes one line of JSON: {"port": ...} when it serves, {"error": ...} if it
              cannot start

Child side: `watch_lifeline` first, then `announce_ready` or `announce_failure` once. In a process
that was started by hand the first two do nothing, and the last writes to standard error.

Threads: `NAME-waiter` (one a child, ends with it) reaps the child, so there are no zombies;
`lifeline` in the child ends with the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from expertmesh.errors import StartupError
from expertmesh.settings import data_home

LIFELINE_FD = "EXPERTMESH_LIFELINE_FD"
READY_FD = "EXPERTMESH_READY_FD"

_MAX_READY_BYTES = 65_536
_ORPHANED_EXIT_CODE = 70


HUGE_PAGES = (
    "glibc.malloc.hugetlb=1"
    ":glibc.malloc.mmap_threshold=67108864"
    ":glibc.malloc.trim_threshold=67108864"
)
"""Weights on transparent huge pages: on a virtual machine, where a TLB miss walks two page tables,
reading 4 KiB pages was up to 12 times slower and decoding 1.4 to 1.6 times (docs/log.md). Smaller
tensors than the threshold come from the heap, which huge pages fill; other C libraries ignore it.
"""


_SECRETS = (
    *("EXPERTMESH_API_KEY", "EXPERTMESH_API_KEYS", "EXPERTMESH_API_KEY_DIGESTS"),
    *("EXPERTMESH_ADMIN_KEY", "EXPERTMESH_ADMIN_KEYS", "EXPERTMESH_ADMIN_KEY_DIGESTS"),
)
"""What only the gateway is told, on purpose."""


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of a child: one thread a process, no spinning, our cache of kernels.

    An OpenMP team that spins after its region steals the core of the process that it waits for,
    and a descheduled one stalls for 10 ms at a time; our kernels are single-threaded.
    """
    environment = dict(os.environ)
    environment.setdefault("GLIBC_TUNABLES", HUGE_PAGES)
    environment.pop(LIFELINE_FD, None)
    environment.pop(READY_FD, None)
    for name in _SECRETS:
        environment.pop(name, None)
    for name in ("OMP", "MKL", "OPENBLAS", "NUMBA"):
        environment[f"{name}_NUM_THREADS"] = "1"
    environment["OMP_WAIT_POLICY"] = "passive"
    environment["GRPC_ENABLE_FORK_SUPPORT"] = "false"
    environment["PYTHONUNBUFFERED"] = "1"
    environment["PYTHONSAFEPATH"] = "1"  # a folder `gateway` in the working folder is not ours
    environment["PYTHONPATH"] = os.pathsep.join(_import_paths())
    environment.setdefault("NUMBA_CACHE_DIR", str(data_home() / "numba"))
    environment.setdefault("TRITON_CACHE_DIR", str(data_home() / "triton"))
    return environment | dict(extra or {})


def _import_paths() -> list[str]:
    """PYTHONPATH of a child: the source tree, if we run from one, before what was there."""
    root = Path(__file__).parents[1]
    kernels = root / "kernels"
    own = [str(root), str(kernels)] if (kernels / "expertmesh_kernels").is_dir() else []
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return own + [path for path in inherited if path and path not in own]


class Child:
    """A running child process. Made by `spawn`; methods may be called from any thread."""

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        lifeline_fd: int,
        ready_fd: int,
        on_exit: Callable[[Child], None] | None,
    ) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._lifeline_fd = lifeline_fd
        self._ready_fd = ready_fd
        self._on_exit = on_exit
        self._exited = threading.Event()
        self._waiter = threading.Thread(target=self._reap, name=f"{name}-waiter", daemon=True)
        self._waiter.start()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative is the number of the signal that ended it."""
        return self._process.returncode if self._exited.is_set() else None

    @property
    def alive(self) -> bool:
        """True until the process has ended and was reaped."""
        return not self._exited.is_set()

    def describe_exit(self) -> str:
        """How it ended, in words: `was killed by SIGKILL`, `ended with exit code 3`."""
        code = self.exit_code
        if code is None:
            return "is running"
        if code >= 0:
            return f"ended with exit code {code}"
        return f"was killed by {_signal_name(-code)}"

    def wait(self, timeout_s: float) -> bool:
        """True if it has ended within the time."""
        return self._exited.wait(timeout_s)

    def wait_ready(self, timeout_s: float) -> dict[str, object]:
        """The child's ready line. Call once.

        Raises:
            StartupError: The child says that it cannot start (its message, fix and exit code),
                ends before it is ready, or is not ready in time.
        """
        fd, self._ready_fd = self._ready_fd, -1
        try:
            line = _read_line(fd, time.monotonic() + timeout_s)
        finally:
            os.close(fd)
        if line is None:
            raise StartupError(f"{self.name} was not ready after {timeout_s:g} s")
        if not line:
            self.wait(1.0)
            raise StartupError(f"{self.name} {self.describe_exit()} before it was ready")
        message: dict[str, object] = json.loads(line)
        if "error" in message:
            raise _announced_error(self.name, message)
        return message

    def terminate(self) -> None:
        """Asks it to stop (SIGTERM); no effect once it has ended."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends its whole process group at once (SIGKILL); no effect once it has ended."""
        self._signal(signal.SIGKILL)

    def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after the grace; the child is gone and reaped at return."""
        self.terminate()
        if not self.wait(grace_s):
            self.kill()
            self.wait(5.0)
        if self._ready_fd >= 0:
            os.close(self._ready_fd)
            self._ready_fd = -1

    def _signal(self, number: signal.Signals) -> None:
        if not self.alive:
            return
        with contextlib.suppress(ProcessLookupError):  # it ended in this very moment
            if number is signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    def _reap(self) -> None:
        self._process.wait()
        os.close(self._lifeline_fd)
        self._exited.set()
        if self._on_exit is not None:
            self._on_exit(self)


def spawn(
    argv: Sequence[str],
    name: str,
    *,
    environment: Mapping[str, str] | None = None,
    on_exit: Callable[[Child], None] | None = None,
) -> Child:
    """Starts `argv` as a child that ends when this process does, in whatever way.

    Args:
        argv: Program and arguments.
        name: What to call it in messages, e.g. `expert worker 0`.
        environment: Additions to `child_environment()`.
        on_exit: Called once in the waiter thread, after the child was reaped.
    """
    lifeline_read, lifeline_write = os.pipe()
    ready_read, ready_write = os.pipe()
    fds = {LIFELINE_FD: str(lifeline_read), READY_FD: str(ready_write)}
    try:
        process = subprocess.Popen(
            argv,
            env=child_environment(environment) | fds,
            stdin=subprocess.DEVNULL,
            stdout=2,  # standard output belongs to the parent
            pass_fds=(lifeline_read, ready_write),
            process_group=0,  # not that of Ctrl-C; within our session, where priorities count
        )
    except OSError as error:
        os.close(lifeline_write)
        os.close(ready_read)
        raise StartupError(f"cannot start {name}: {error}") from error
    finally:
        os.close(lifeline_read)
        os.close(ready_write)
    return Child(name, process, lifeline_write, ready_read, on_exit)


def spawn_module(
    module: str,
    arguments: Sequence[str],
    name: str,
    *,
    environment: Mapping[str, str] | None = None,
    on_exit: Callable[[Child], None] | None = None,
) -> Child:
    """`spawn` of `python -m module arguments` with this interpreter."""
    argv = [sys.executable, "-m", module, *arguments]
    return spawn(argv, name, environment=environment, on_exit=on_exit)


def watch_lifeline(on_parent_gone: Callable[[], None], *, hard_exit_s: float = 3.0) -> None:
    """In a child: calls `on_parent_gone` when the parent is gone, and ends the process soon after.

    Call first of all. Without a lifeline (started by hand) nothing happens.

    Args:
        on_parent_gone: Starts a graceful stop; must not block.
        hard_exit_s: Seconds for it; then the process ends without ceremony.
    """
    fd = _take_fd(LIFELINE_FD)
    if fd is None:
        return

    def watch() -> None:
        while os.read(fd, 1):
            continue
        on_parent_gone()
        time.sleep(hard_exit_s)
        os._exit(_ORPHANED_EXIT_CODE)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def announce_ready(info: Mapping[str, object]) -> None:
    """Tells the parent, if there is one, that this process serves. Once."""
    _announce(dict(info))


def announce_failure(error: StartupError) -> None:
    """Tells the parent why this process cannot start, or standard error if started by hand."""
    told = _announce({"error": error.message, "fix": error.fix, "exit_code": error.exit_code})
    if not told or os.environ.get("EXPERTMESH_DEBUG") == "1":
        write_error(error)


def write_error(error: BaseException) -> None:
    """Writes `error: ...`, and `fix: ...` if there is one, to standard error.

    A traceback is written only with EXPERTMESH_DEBUG=1.
    """
    if os.environ.get("EXPERTMESH_DEBUG") == "1":
        traceback.print_exception(error)
    message = error.message if isinstance(error, StartupError) else str(error)
    lines = [f"error: {' '.join(message.split())}"]
    if isinstance(error, StartupError) and error.fix:
        lines.append(f"fix: {' '.join(error.fix.split())}")
    sys.stderr.write("\n".join(lines) + "\n")


def _announce(message: dict[str, object]) -> bool:
    """True if there was a parent to tell."""
    fd = _take_fd(READY_FD)
    if fd is None:
        return False
    line = json.dumps(message).encode()[: _MAX_READY_BYTES - 1] + b"\n"
    with contextlib.suppress(BrokenPipeError):  # the parent is gone: the lifeline handles it
        os.write(fd, line)
    os.close(fd)
    return True


def _take_fd(name: str) -> int | None:
    """The descriptor in this environment variable; taken once, and not passed on."""
    text = os.environ.pop(name, None)
    if text is None:
        return None
    fd = int(text)
    os.set_inheritable(fd, False)
    return fd


def _read_line(fd: int, deadline: float) -> bytes | None:
    """A line without its end; empty if the pipe closed before; None after the deadline."""
    received = b""
    while b"\n" not in received and len(received) < _MAX_READY_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            return None
        chunk = os.read(fd, 4096)
        if not chunk:
            return b""
        received += chunk
    return received.partition(b"\n")[0]


def _announced_error(name: str, message: Mapping[str, object]) -> StartupError:
    error = StartupError(f"{name}: {message['error']}", fix=str(message.get("fix", "")))
    code = message.get("exit_code")
    if isinstance(code, int):
        error.exit_code = code
    return error


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
