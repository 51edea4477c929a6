"""`expertmesh model`: what the commands take for a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.command.cli import run_command
from tests.support.tiny_folders import MIXTRAL_CONFIG


@pytest.mark.parametrize(
    "arguments",
    [["inspect", "demmo"], ["upcycle", "demmo", "out", "--experts", "2", "--top-k", "1"]],
)
def test_no_folder_and_no_demo_model(
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They take the names of demo models as `serve` does, and list them for a name that is none."""
    monkeypatch.chdir(tmp_path)

    assert run_command(["model", *arguments]) == 3
    assert capsys.readouterr().err == (
        "error: model 'demmo': not a folder\n"
        "fix: give a folder with config.json, ORGANISATION/NAME of the Hugging Face hub, "
        "or one of demo, demo-granular, demo-plain, demo-dense\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def description(tmp_path: Path) -> Path:
    """A folder with `config.json` and nothing else."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MIXTRAL_CONFIG))
    return folder


def test_inspect_prints_a_page_or_json(
    description: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both from `config.json` alone, the same in every run, with nothing on standard error."""
    printed = []
    for arguments in ([], [], ["--json"], ["--json", "--context", "7"]):
        assert run_command(["model", "inspect", str(description), *arguments]) == 0
        printed.append(capsys.readouterr())
    assert [output.err for output in printed] == [""] * 4
    assert printed[0] == printed[1]
    assert printed[0].out.startswith("Model\n  family ")
    first, second = (json.loads(output.out) for output in printed[2:])
    assert (first["family"], first["weights"]) == ("mixtral", None)
    assert (first["token"]["context"], second["token"]["context"]) == (128, 7)


@pytest.mark.parametrize(
    ("changes", "arguments", "code", "message"),
    [
        (None, [], 3, "/config.json: "),
        ({"model_type": "gpt2"}, [], 3, "/config.json: model_type: expected a supported family ("),
        ({"hidden_act": "relu"}, [], 3, "/config.json: hidden_act: expected "),
        ({"num_hidden_layers": 10**9}, [], 3, "/config.json: num_hidden_layers: expected "),
        ({}, ["--context", "0"], 2, "context is 0, expected 1 to 128"),
        ({}, ["--context", "many"], 2, "--context"),
    ],
)
def test_inspect_names_what_is_wrong(
    description: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object] | None,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    """One line with the culprit, and the exit code of other commands."""
    path = description / "config.json"
    if changes is None:
        path.unlink()
    else:
        path.write_text(json.dumps(MIXTRAL_CONFIG | changes))
    assert run_command(["model", "inspect", str(description), *arguments]) == code
    output = capsys.readouterr()
    first, *fix = output.err.splitlines()
    assert first.startswith("error: ")
    assert message in first
    assert all(line.startswith("fix: ") for line in fix)
    assert output.out == ""
