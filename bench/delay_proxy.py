"""A simulated network: TCP connections whose bytes arrive later, by the same time each way.

`python -m bench.delay_proxy DELAY_US PORT...` listens on 127.0.0.2 at each port, connects to
127.0.0.1 at the same port, and prints `ready`. So everything that a process offers on its ports is
delayed, whatever the protocol. What it costs itself, without a delay, is there in every run.
"""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

HOST, TARGET = "127.0.0.2", "127.0.0.1"
_BYTES = 1 << 20


def _pass_on(source: socket.socket, target: socket.socket, delay_s: float) -> None:
    """Bytes of one direction, until their end."""
    waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def send() -> None:
        while True:
            due_s, data = waiting.get()
            if (left_s := due_s - time.monotonic()) > 0:
                time.sleep(left_s)
            try:
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)
            except OSError:
                return

    threading.Thread(target=send, daemon=True).start()
    data = b"open"
    while data:
        try:
            data = source.recv(_BYTES)
        except OSError:
            data = b""
        waiting.put((time.monotonic() + delay_s, data))


def _serve(port: int, delay_s: float) -> None:
    with socket.create_server((HOST, port)) as listener:
        while True:
            here, _ = listener.accept()
            there = socket.create_connection((TARGET, port))
            for each in (here, there):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for pair in ((here, there), (there, here)):
                threading.Thread(target=_pass_on, args=(*pair, delay_s), daemon=True).start()


@contextmanager
def delayed(ports: Sequence[int], delay_us: int) -> Iterator[None]:
    """The proxy as a process of its own."""
    argv = [sys.executable, "-m", "bench.delay_proxy", str(delay_us), *map(str, ports)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()


def main() -> None:
    """Serves until it is killed."""
    sys.setswitchinterval(0.0005)
    delay_us, *ports = map(int, sys.argv[1:])
    for port in ports:
        threading.Thread(target=_serve, args=(port, delay_us / 1e6), daemon=True).start()
    print("ready", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
