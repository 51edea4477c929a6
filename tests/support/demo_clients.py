"""What real clients ask the demo model, and how they are run as processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.api import Json

MODEL = "demo"
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
ASKED: Json = [{"role": "user", "content": QUESTION}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Json = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    timeout_s: float = 60.0,
) -> str:
    """Runs a client to its end, which must be a good one, and returns what it printed.

    Args:
        command: Program and arguments.
        env: Changes to the environment; None removes a variable.
        cwd: Where it runs.
        timeout_s: Longest time that it may take.
    """
    merged = {**os.environ, **(env or {})}
    done = subprocess.run(
        list(command),
        env={name: value for name, value in merged.items() if value is not None},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    shown = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}: {shown}"
    return done.stdout


def _link(source: Path, target: Path) -> None:
    """The same file at another place, without a copy where the file system can do that."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def greedy_model(model_dir: Path, folder: Path) -> Path:
    """Makes `folder` the same model, whose authors recommend to be greedy."""
    for path in model_dir.iterdir():
        _link(path, folder / path.name)
    config = folder / "generation_config.json"
    content = json.loads(config.read_text())
    config.unlink()
    config.write_text(json.dumps({**content, "temperature": 0}))
    return folder
