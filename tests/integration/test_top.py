"""`expertmesh top` and `expertmesh experts` beside a real mesh, as their users call them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.mesh import COMMAND, Server, serve
from tests.support.processes import free_port, run
from tests.support.tiny_checkpoints import MIXTRAL, save_tiny

NUM_TOKENS = 24
PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two expert workers that have computed one request."""
    model = save_tiny(tmp_path_factory.mktemp("models") / "served", MIXTRAL)
    with serve(model, "--no-prefix-caching", expert_workers=2) as server:
        body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        assert server.api.post("/v1/completions", body).status == 200
        yield server


def url_of(server: Server) -> str:
    """Where it is asked."""
    return f"http://127.0.0.1:{server.api.port}"


def call(*arguments: str) -> str:
    """What a command prints."""
    done = run([*COMMAND, *arguments])
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_top(mesh: Server) -> None:
    """Expert workers, and numbers of the mesh, for people and for programs."""
    event = json.loads(call("top", "--once", "--output", "json", "--url", url_of(mesh)))
    names = [worker["worker_id"] for worker in event["workers"]]
    assert len(names) == 2
    text = call("top", "--once", "--url", url_of(mesh))
    assert all(name in text for name in (*names, "ready", "tokens/s", "KV"))


def test_experts(mesh: Server, tmp_path: Path) -> None:
    """A line for each layer, and the same counts in files of all kinds."""
    shown = call("experts", "show", "--window", "all", "--url", url_of(mesh)).splitlines()
    assert len(shown) == 2 + MIXTRAL.num_layers
    for ending in ("json", "npy", "csv"):
        call("experts", "export", str(tmp_path / f"use.{ending}"), "--url", url_of(mesh))
    tokens = np.load(tmp_path / "use.npy")
    # The last token of all is sampled, and goes through no layer.
    rows = len(PROMPT) + NUM_TOKENS - 1
    assert tokens.sum(axis=1).tolist() == [rows * MIXTRAL.top_k] * MIXTRAL.num_layers
    assert json.loads((tmp_path / "use.json").read_text())["tokens"] == tokens.tolist()
    with (tmp_path / "use.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [int(line["tokens"]) for line in lines] == tokens.ravel().tolist()
    assert {int(line["copies"]) for line in lines} == {2}


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (("top", "--once"), "no server answers"),
        (("experts", "show"), "no server answers"),
        (("top", "--output", "yaml"), "yaml"),
        (("experts", "export", "use.txt"), "use.txt"),
        (("experts", "show", "--window", "7"), "7"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_shown(arguments: tuple[str, ...], mentions: str) -> None:
    """One line says why."""
    done = run([*COMMAND, *arguments, "--url", f"http://127.0.0.1:{free_port()}"])
    assert done.returncode != 0
    assert done.stderr.startswith("error: ")
    assert mentions in done.stderr
