"""`expertmesh doctor`: what would keep a gateway with these settings from working."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from expertmesh.settings import EngineSettings, HttpSettings, MeshOptions, ModelOptions, data_home

if TYPE_CHECKING:
    from gateway.doctor.finding import Finding


def examine(
    model: str,
    options: ModelOptions,
    http: HttpSettings,
    mesh: MeshOptions,
    engine: EngineSettings,
    *,
    url: str | None,
    as_json: bool,
) -> int:
    """Prints a report; returns the exit code, 1 if something must be done.

    Args:
        model: As for `serve`.
        options: How it would be served.
        http: Where a gateway would listen.
        mesh: Where expert workers are; none are looked for if it does not say.
        engine: Limits of the gateway.
        url: Server to ask, instead of looking at ports; None for none.
        as_json: For programs.
    """
    from gateway.doctor import report

    logging.getLogger().addHandler(logging.NullHandler())  # findings say all of it
    findings = list(_findings(model, options, http, mesh, engine, url))
    text = report.as_json(findings) if as_json else report.as_text(findings)
    sys.stdout.write(f"{text}\n")
    return report.exit_code(findings)


def _findings(
    model: str,
    options: ModelOptions,
    http: HttpSettings,
    mesh: MeshOptions,
    engine: EngineSettings,
    url: str | None,
) -> Iterator[Finding]:
    from gateway.doctor.machine import check_machine
    from gateway.doctor.model import check_model
    from gateway.doctor.network import check_ports, check_server
    from gateway.doctor.storage import check_storage
    from gateway.doctor.workers import check_workers

    yield from check_machine()
    yield from check_storage(data_home())
    checkpoint, of_model = check_model(model, data_home())
    yield from of_model
    yield from check_ports(http) if url is None else check_server(url)
    if mesh.experts and not mesh.colocated:
        yield from check_workers(mesh, checkpoint, options, engine)
