"""`expertmesh model`: what the commands take for a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.command.cli import run_command


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
        "fix: give a folder with config.json, "
        "or one of demo, demo-granular, demo-plain, demo-dense\n"
    )
    assert list(tmp_path.iterdir()) == []
