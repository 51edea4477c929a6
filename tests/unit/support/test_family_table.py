"""The table of families in README.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from expertmesh.families import FAMILIES
from tests.support.family_table import (
    BEGIN,
    END,
    HEADER,
    ROWS,
    cells_in,
    known_rows,
    main,
    replaced,
    table,
)
from tests.support.parity_results import VARIABLE, ParityResult, record

ROOT = Path(__file__).resolve().parents[3]
README, DOCS = ROOT / "README.md", ROOT / "docs" / "models.md"

DENSE, MOE = (row for row in ROWS if row.model_type in ("llama", "mixtral"))
RESULTS = {
    ("llama", "colocated"): ParityResult("llama", "colocated", 1.26e-5, 30, 32),
    ("mixtral", "colocated"): ParityResult("mixtral", "colocated", 0.0, 32, 32),
    ("mixtral", "2 expert workers"): ParityResult("mixtral", "2 expert workers", 3e-6, 31, 32),
}


def test_table_has_the_figures_of_each_family() -> None:
    """A dense model has no expert workers; tokens of all layouts are added."""
    text = f"{BEGIN}\n{table([DENSE, MOE], RESULTS)}\n{END}"
    assert cells_in(text) == [
        (*DENSE.cells, "1e-5", "no experts", "30 of 32"),
        (*MOE.cells, "0", "3e-6", "63 of 64"),
    ]
    assert text.splitlines()[1] == f"| {' | '.join(HEADER)} |"


def test_family_that_was_not_measured_is_refused() -> None:
    """No line without figures."""
    with pytest.raises(ValueError, match="llama: not measured"):
        table([DENSE], {})


@pytest.mark.parametrize("text", ["", BEGIN, f"{END} {BEGIN}", f"{BEGIN} {BEGIN} {END}"])
def test_text_without_markers_is_left_alone(text: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(ValueError, match="once each"):
        replaced(text, "table")


def test_tool_rewrites_the_block_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as it is run."""
    path, results = tmp_path / "README.md", tmp_path / "results"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    monkeypatch.setenv(VARIABLE, str(results))
    for row in known_rows():
        record(ParityResult(row.model_type, "colocated", 1e-6, 8, 8))
    for _ in range(2):
        main(str(results), str(path))
    text = path.read_text()
    assert text.startswith(f"before\n{BEGIN}\n| family |")
    assert text.endswith(f"|\n{END}\nafter\n")
    assert [cells[1] for cells in cells_in(text)] == [row.cells[1] for row in known_rows()]


def test_every_family_is_documented() -> None:
    """In the tool's table, and with its variants in docs/models.md."""
    assert {row.model_type for row in ROWS} == set(FAMILIES)
    _, _, section = DOCS.read_text().partition("\n## Families\n")
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    named = [name for line in lines for name in re.findall(r"`(\w+)`", line.split(" | ")[0])]
    assert sorted(named) == sorted(("model_type", *FAMILIES))  # the header first


def test_readme_has_every_family_as_measured() -> None:
    """Run `make family-table` after a change of a family; every token was equal."""
    found = cells_in(README.read_text())
    assert [cells[:5] for cells in found] == [row.cells for row in known_rows()]
    for *_, colocated, remote, tokens in found:
        assert float(colocated) < 1e-3
        assert remote == "no experts" or float(remote) < 1e-3
        equal, compared = tokens.split(" of ")
        assert int(equal) == int(compared) > 0
