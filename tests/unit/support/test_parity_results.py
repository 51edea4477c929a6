"""The file in which parity tests note what they measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.parity_results import VARIABLE, ParityResult, read_results, record

FIRST = ParityResult("mixtral", "colocated", 1e-6, 40, 40)
SECOND = ParityResult("mixtral", "colocated", 3e-6, 39, 40)
REMOTE = ParityResult("mixtral", "2 expert workers", 2e-6, 40, 40)


def test_results_of_several_tests_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest difference and all tokens count, per family and layout."""
    path = tmp_path / "results"
    monkeypatch.setenv(VARIABLE, str(path))
    for result in (FIRST, REMOTE, SECOND):
        record(result)
    assert read_results(path) == {
        ("mixtral", "colocated"): ParityResult("mixtral", "colocated", 3e-6, 79, 80),
        ("mixtral", "2 expert workers"): REMOTE,
    }


def test_nothing_is_written_unless_a_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ordinary runs of the tests leave no file behind."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    record(FIRST)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"model_type": "mixtral"}',
        '{"model_type": "m", "layout": "elsewhere", "max_logit_difference": 0, '
        '"tokens_equal": 1, "tokens_compared": 1}',
        '{"model_type": "m", "layout": "colocated", "max_logit_difference": NaN, '
        '"tokens_equal": 1, "tokens_compared": 1}',
        '{"model_type": "m", "layout": "colocated", "max_logit_difference": Infinity, '
        '"tokens_equal": 1, "tokens_compared": 1}',
        '{"model_type": "m", "layout": "colocated", "max_logit_difference": 0, '
        '"tokens_equal": 2, "tokens_compared": 1}',
    ],
)
def test_line_that_is_no_result_is_refused(tmp_path: Path, line: str) -> None:
    """With file and line: a table is never made of something else."""
    path = tmp_path / "results"
    path.write_text(f"\n{line}\n")
    with pytest.raises(ValueError, match="results, line 2: "):
        read_results(path)
