"""Expert workers in network namespaces of their own, each at the end of a virtual cable.

Unlike the lines of `network`, what is lost here is lost by the kernel: a cable that is pulled
resets nothing, and nobody answers. Needs root on Linux. Names begin with `PREFIX` and the number of
the process that made them, so that what a killed run left behind is found and removed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import psutil

from tests.chaos.harness.pool import EXPERT_WORKER

PREFIX = "emnet"
TOOLS = ("ip", "nsenter", "nft", "tc")
_NAME = re.compile(rf"{PREFIX}(\d+)x\d")
_ENTER = "import os, sys; os.execvp('nsenter', ['nsenter', *sys.argv[1:]])"
_TIMEOUT_S = 10.0
_FAR = "far"
_TABLE = f"inet {PREFIX}"
_RATE_BURST = "16kb"
_RATE_WAIT = "200ms"


class NamespaceError(AssertionError):
    """A command that sets up a namespace failed."""


def why_not() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if sys.platform != "linux":
        return "network namespaces are a matter of Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)} (iproute2, util-linux, nftables)"
    try:
        with namespaces(1) as (wire,), wire.losing(requests=True, replies=True), wire.narrow(1):
            return ""
    except NamespaceError as error:
        return f"no network namespaces here: {error}"


@dataclass(frozen=True)
class Wire:
    """The cable to a namespace, and what may happen to it. Conditions are contexts."""

    name: str
    """Of the namespace, and of the cable's end on our side."""
    near: str
    """Our address."""
    host: str
    """The address in the namespace."""

    @contextmanager
    def unplugged(self) -> Iterator[None]:
        """Nothing passes, in either direction, and nobody is told.

        The far end is taken down: with the near one its route would go, and packets elsewhere.
        """
        self._inside("ip", "link", "set", _FAR, "down")
        try:
            yield
        finally:
            self._inside("ip", "link", "set", _FAR, "up")

    def losing(
        self, *, requests: bool = False, replies: bool = False, percent: int = 100
    ) -> AbstractContextManager[None]:
        """Packets are dropped: those to the namespace, those from it, or both."""
        chance = "" if percent == 100 else f"numgen random mod 100 < {percent} "
        return self._filtered(
            *([f"input meta l4proto tcp {chance}drop"] if requests else []),
            *([f"output meta l4proto tcp {chance}drop"] if replies else []),
        )

    def resetting(self) -> AbstractContextManager[None]:
        """Whoever says something to the namespace, or tries to connect, is answered by a reset."""
        return self._filtered("input meta l4proto tcp reject with tcp reset")

    @contextmanager
    def narrow(self, megabits: int) -> Iterator[None]:
        """So many megabits per second, each way."""
        limit = ("tbf", "rate", f"{megabits}mbit", "burst", _RATE_BURST, "latency", _RATE_WAIT)
        _command("tc", "qdisc", "add", "dev", self.name, "root", *limit)
        self._inside("tc", "qdisc", "add", "dev", _FAR, "root", *limit)
        try:
            yield
        finally:
            self._inside("tc", "qdisc", "del", "dev", _FAR, "root")
            _command("tc", "qdisc", "del", "dev", self.name, "root")

    def program(self) -> tuple[str, ...]:
        """What Python runs to be an expert worker in the namespace."""
        return ("-c", _ENTER, f"--net=/run/netns/{self.name}", sys.executable, *EXPERT_WORKER)

    @contextmanager
    def _filtered(self, *rules: str) -> Iterator[None]:
        chains = "".join(
            f"chain c{number} {{ type filter hook {rule.split()[0]} priority 0; }}\n"
            for number, rule in enumerate(rules)
        )
        added = "".join(
            f"add rule {_TABLE} c{number} {rule.partition(' ')[2]}\n"
            for number, rule in enumerate(rules)
        )
        self._inside("nft", "-f", "-", text=f"table {_TABLE} {{\n{chains}}}\n{added}")
        try:
            yield
        finally:
            self._inside("nft", "delete", "table", *_TABLE.split())

    def _inside(self, *argv: str, text: str = "") -> None:
        _command("nsenter", f"--net=/run/netns/{self.name}", *argv, text=text)


@contextmanager
def namespaces(count: int) -> Iterator[list[Wire]]:
    """So many namespaces, empty; gone at the end, with all that earlier runs have left behind."""
    _remove_left_behind()
    with ExitStack() as stack:
        yield [stack.enter_context(_namespace(number)) for number in range(count)]


@contextmanager
def _namespace(number: int) -> Iterator[Wire]:
    block = f"198.18.{os.getpid() % 256}"  # set aside for tests of networks
    wire = Wire(
        f"{PREFIX}{os.getpid()}x{number}",
        f"{block}.{4 * number + 1}",
        f"{block}.{4 * number + 2}",
    )
    try:
        _command("ip", "netns", "add", wire.name)
        far = ("type", "veth", "peer", "name", _FAR, "netns", wire.name)
        _command("ip", "link", "add", wire.name, *far)
        for where, device, address in (
            (("ip",), wire.name, wire.near),
            (("ip", "-n", wire.name), _FAR, wire.host),
        ):
            _command(*where, "addr", "add", f"{address}/30", "dev", device)
            _command(*where, "link", "set", device, "up")
        _command("ip", "-n", wire.name, "link", "set", "lo", "up")
        yield wire
    finally:
        _remove(wire.name)


def _remove_left_behind() -> None:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    devices = os.listdir("/sys/class/net")
    for name in {*listed.stdout.split(), *devices}:
        maker = _NAME.fullmatch(name)
        if maker and not psutil.pid_exists(int(maker[1])):
            _remove(name)


def _remove(name: str) -> None:
    """Both ends of a cable go together; a namespace lives on while a process is in it."""
    for argv in (("ip", "link", "delete", name), ("ip", "netns", "delete", name)):
        subprocess.run(argv, stderr=subprocess.DEVNULL, timeout=_TIMEOUT_S, check=False)


def _command(*argv: str, text: str = "") -> None:
    done = subprocess.run(
        argv, input=text, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise NamespaceError(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")
