"""Compiled functions and the folder that keeps them."""

from __future__ import annotations

import errno
import logging

import pytest

from expertmesh_kernels.cpu.jit import njit


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
