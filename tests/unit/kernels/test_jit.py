"""Compiled functions and the folder that keeps them."""

from __future__ import annotations

import errno
import logging

import pytest

from expertmesh_kernels.cpu.jit import njit
from expertmesh_kernels.cpu.kept import KEPT


def double(number: int) -> int:
    return 2 * number


def test_a_full_disk_does_not_keep_a_kernel_from_running(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be saved is compiled and runs all the same, with a warning."""
    compiled = njit(double)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = compiled._cache  # type: ignore[attr-defined]
    monkeypatch.setattr(cache, "_load_overload", lambda *_: None)
    monkeypatch.setattr(cache, "_save_overload", full)
    with caplog.at_level(logging.WARNING):
        assert compiled(21) == 42
    assert "No space left on device" in caplog.text


def test_a_missing_kernel_is_asked_for_until_there_is_no_more_hope(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After each fetch that may have brought it the disk is asked again; then it is compiled."""
    compiled = njit(double)
    asked: list[str] = []
    answers = iter([True, True, False])

    def load(*_: object) -> None:
        asked.append("disk")

    def fetch() -> bool:
        asked.append("others")
        return next(answers)

    cache = compiled._cache  # type: ignore[attr-defined]
    monkeypatch.setattr(cache, "_load_overload", load)
    monkeypatch.setattr(KEPT, "fetch", fetch)
    before = KEPT.num_compiled
    assert compiled(21) == 42
    assert asked == ["disk", "others", "disk", "others", "disk", "others"]
    assert KEPT.num_compiled == before + 1
