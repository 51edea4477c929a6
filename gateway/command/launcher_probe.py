"""Asks the gateway whether it is ready, while the main thread watches the children."""

from __future__ import annotations

import http.client
import json
import ssl
import time

from expertmesh.errors import StartupError

_TIMEOUT_S = 2.0


class ReadyProbe:
    """Polls /ready of a gateway on this machine.

    Args:
        host: What the gateway is bound to.
        timeout_s: For /ready to become 200, counted from now.
        encrypted: Whether it speaks TLS.
    """

    def __init__(self, host: str, *, timeout_s: float, encrypted: bool = False) -> None:
        self.host = reachable_host(host)
        self.scheme = "https" if encrypted else "http"
        self.num_uncovered = 0
        """(layer, expert) pairs without a copy, by the last answer."""
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._last = "no answer"

    def is_ready(self, gateway_info: dict[str, object]) -> bool:
        """True once /ready answers 200.

        Args:
            gateway_info: Ready line of the gateway, with its `http_port`.

        Raises:
            StartupError: The time is over; says what /ready answered last.
        """
        status, body = self._get(http_port(gateway_info))
        if status == http.client.OK:
            self.num_uncovered = _num_uncovered(body)
            return True
        if status:
            self._last = body.strip()
        if time.monotonic() > self._deadline_s:
            raise StartupError(f"gateway is not ready after {self._timeout_s:g} s: {self._last}")
        return False

    def _connection(self, port: int) -> http.client.HTTPConnection:
        if self.scheme == "http":
            return http.client.HTTPConnection(self.host, port, timeout=_TIMEOUT_S)
        context = context_for_own_gateway()
        return http.client.HTTPSConnection(self.host, port, timeout=_TIMEOUT_S, context=context)

    def _get(self, port: int) -> tuple[int, str]:
        """Status and body; 0 if there was no answer."""
        connection = self._connection(port)
        try:
            connection.request("GET", "/ready")
            response = connection.getresponse()
            return response.status, response.read(65_536).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            self._last = str(error)
            return 0, ""
        finally:
            connection.close()


def context_for_own_gateway() -> ssl.SSLContext:
    """Trusts whoever answers: a process that we have started, by an address of this machine, which
    its certificate need not name."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def http_port(gateway_info: dict[str, object]) -> int:
    """Port of the HTTP API in a gateway's ready line."""
    port = gateway_info.get("http_port")
    assert isinstance(port, int), gateway_info
    return port


def reachable_host(host: str) -> str:
    """An address at which a server bound to `host` can be reached from this machine."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


def _num_uncovered(body: str) -> int:
    """Pairs in `uncovered`, a mapping of layers to experts; 0 if there is none."""
    try:
        report = json.loads(body)
    except ValueError:
        return 0
    uncovered = report.get("uncovered") if isinstance(report, dict) else None
    return sum(len(experts) for experts in uncovered.values()) if isinstance(uncovered, dict) else 0
