"""Devices by name."""

from __future__ import annotations

import pytest

from expertmesh.errors import SettingsError
from expertmesh_kernels.host import find_device


@pytest.mark.parametrize("name", ["banana", "", "cuda:99", "meta", "cpu:x", "mps", "cpu\n"])
def test_a_device_that_is_not_there_is_a_wrong_setting(name: str) -> None:
    """Whatever torch thinks of it, there is one error that names it."""
    with pytest.raises(SettingsError, match="device is "):
        find_device(name)


def test_the_cpu_is_there() -> None:
    """Every machine has one."""
    assert find_device("cpu").type == "cpu"
