"""Ports of a gateway, and a server that runs already."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator

from expertmesh import PROTOCOL_REVISION, __version__
from expertmesh.addresses import join_address
from expertmesh.errors import PortError
from expertmesh.settings import HttpSettings
from gateway.command.launcher import check_port
from gateway.command.launcher_probe import reachable_host
from gateway.doctor.finding import Finding, broken, fine, warning

_TIMEOUT_S = 3.0
_MAX_BYTES = 2**20
_SHOWN_WORKERS = 16

Json = dict[str, object]


def check_ports(http_settings: HttpSettings) -> Iterator[Finding]:
    """Whether a gateway could listen.

    Args:
        http_settings: Where it would.
    """
    host = http_settings.host
    for name, port in (("port", http_settings.port), ("grpc_port", http_settings.grpc_port)):
        flag = f"--{name.replace('_', '-')}"
        try:
            check_port(name, host, port)
        except PortError as error:
            yield _taken(error, _version_at(host, http_settings.port))
        else:
            yield fine("port", f"{flag} {port} is free on {host}" if port else f"{flag} is any")


def _taken(error: PortError, version: str) -> Finding:
    if version:
        message = f"{error.message}: ExpertMesh {version} runs there"
        return warning("port", message, f"nothing, if that one is meant; else {error.fix}")
    return broken("port", error.message, error.fix)


def _version_at(host: str, port: int) -> str:
    """The version of a gateway that answers over HTTP there; empty if none does."""
    try:
        _, told = _get(f"http://{join_address(reachable_host(host), port)}", "/version")
    except (OSError, http.client.HTTPException, ValueError):
        return ""
    return str(told.get("version", "")) if "protocol_revision" in told else ""


def check_server(url: str) -> Iterator[Finding]:
    """Whether a server is up, of this version, and ready.

    Args:
        url: Address of its HTTP API, without a path.
    """
    url = url.rstrip("/")
    try:
        _, told = _get(url, "/version")
        status, report = _get(url, "/ready")
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        fix = "start one with `expertmesh serve`, or name its address with --url"
        yield broken("server", f"no ExpertMesh server answers at {url}: {reason}", fix)
        return
    yield _revision(url, told)
    if status == http.client.OK:
        yield fine("server", f"{url} is ready")
    else:
        message = report.get("message") or f"it answered {status}"
        yield broken("server", f"{url} is not ready: {message}", "see what it says of its workers")
    workers = report.get("workers")
    for worker in workers[:_SHOWN_WORKERS] if isinstance(workers, list) else ():
        yield _worker(worker)


def _revision(url: str, told: Json) -> Finding:
    version, revision = told.get("version"), told.get("protocol_revision")
    message = f"{url} has version {version}, protocol revision {revision}"
    if revision != PROTOCOL_REVISION:
        fix = f"use one release everywhere: this is {__version__}, revision {PROTOCOL_REVISION}"
        return warning("server", message, fix)
    return fine("server", message)


def _worker(told: Json) -> Finding:
    message = f"expert worker {told.get('worker_id')} at {told.get('address')} {told.get('state')}"
    if told.get("state") == "ready":
        return fine("server", f"{message}, {told.get('num_experts')} experts")
    return warning("server", f"{message}: {told.get('message')}", "read its log")


def _get(url: str, path: str) -> tuple[int, Json]:
    """Status and JSON object. Raises OSError, HTTPException or ValueError."""
    try:
        with urllib.request.urlopen(url + path, timeout=_TIMEOUT_S) as response:
            status, body = response.status, response.read(_MAX_BYTES)
    except urllib.error.HTTPError as error:  # an answer too
        status, body = error.code, error.read(_MAX_BYTES)
    told = json.loads(body)
    if not isinstance(told, dict):
        raise ValueError(f"it answered {body[:100]!r}")
    return status, told
