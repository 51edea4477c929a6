"""`expertmesh experts`: how experts are used, as a table and as files."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from expertmesh.errors import SettingsError

experts_app = App(
    name="experts", help="Show how experts are used, and write it to a file.", sort_key=6
)

Json = dict[str, Any]
Window = Literal["10", "60", "300", "all"]
Url = Annotated[str, Parameter(help="Address of the HTTP API.")]
WindowFlag = Annotated[Window, Parameter(help="Seconds to look back, or since the start.")]
_URL = "http://127.0.0.1:8000"


@experts_app.command
def show(
    *,
    url: Url = _URL,
    window: WindowFlag = "60",
    as_json: Annotated[
        bool, Parameter(name="--json", negative="", help="What the server answers.")
    ] = False,
) -> int:
    """Print for each layer how uneven its experts are used, and which are used most."""
    report = _ask(url, window)
    text = json.dumps(report) if as_json else "\n".join(_lines(report))
    sys.stdout.write(f"{text}\n")
    return 0


@experts_app.command
def export(file: Path, *, url: Url = _URL, window: WindowFlag = "all") -> int:
    """Write how often each expert was chosen.

    Parameters
    ----------
    file
        By its ending: .csv has a line for each layer and expert, .npy an array [layer, expert] of
        int64, .json what the server answers.
    """
    write = {".csv": _write_csv, ".npy": _write_npy, ".json": _write_json}.get(file.suffix)
    if write is None:
        raise SettingsError(f"file is {str(file)!r}, expected one that ends in .csv, .npy or .json")
    report = _ask(url, window)
    write(report, file)
    num_layers, rows = len(report["layers"]), sum(report["rows"])
    sys.stdout.write(f"{file}: {num_layers} layers, {rows} rows\n")
    return 0


def _ask(url: str, window: str) -> Json:
    from gateway.command.client_commands import ClientOptions, ask_json

    key = os.environ.get("EXPERTMESH_API_KEY")
    options = ClientOptions(url.rstrip("/"), api_key=key)
    return ask_json(options, "GET", f"/v1/moe/experts?window={window}")


def _lines(report: Json) -> list[str]:
    lines = [
        f"{len(report['layers'])} layers of {report['num_experts']} experts, top "
        f"{report['top_k']}, in {report['window_s']:.0f} s; imbalance: the most used to the mean",
        _row("layer", "rows", "imbalance", "workers", "evenness", "dead", "most used"),
    ]
    imbalance = report["imbalance"]
    for index, layer in enumerate(report["layers"]):
        tokens = report["tokens"][index]
        hottest = ", ".join(
            f"{expert} ({tokens[expert]})" for expert in report["hottest"][index] if expert >= 0
        )
        cells = (
            str(layer),
            str(report["rows"][index]),
            _number(imbalance["expert"][index]),
            _number(imbalance["worker"][index]),
            _number(report["entropy"][index]),
            str(report["dead"][index]),
        )
        lines.append(_row(*cells, hottest))
    return lines


def _row(*cells: str) -> str:
    *numbers, last = cells
    return "".join(f"{cell:>11}" for cell in numbers) + f"  {last}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _write_csv(report: Json, file: Path) -> None:
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(("layer", "expert", "tokens", "share", "utilisation", "copies"))
        columns = ("tokens", "share", "utilisation", "copies")
        for index, layer in enumerate(report["layers"]):
            for expert in range(report["num_experts"]):
                values = (report[column][index][expert] for column in columns)
                writer.writerow((layer, expert, *values))


def _write_npy(report: Json, file: Path) -> None:
    import numpy as np

    np.save(file, np.array(report["tokens"], np.int64))


def _write_json(report: Json, file: Path) -> None:
    file.write_text(json.dumps(report))
