"""GPUs of this machine, through NVIDIA's management library where it and its bindings are there."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

logger = logging.getLogger("gateway")


@dataclass(frozen=True)
class DeviceUse:
    """One GPU at one moment."""

    index: int
    name: str
    utilisation: float
    """Share of the last moments in which something ran on it, 0 to 1."""
    memory_used: int
    """Bytes, by whichever process."""
    memory_total: int


class Devices(Protocol):
    """The GPUs of this machine."""

    def read(self) -> tuple[DeviceUse, ...]:
        """All of them; from any thread."""


class NoDevices:
    """There are none, or nobody can tell."""

    def read(self) -> tuple[DeviceUse, ...]:
        """None."""
        return ()


class NvmlDevices:
    """Those that the library knows.

    Args:
        nvml: The module `pynvml`, initialised.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]

    def read(self) -> tuple[DeviceUse, ...]:
        """All that answer; one that fell off the bus is left out."""
        found = []
        for index, handle in enumerate(self._handles):
            try:
                found.append(self._read(index, handle))
            except self._nvml.NVMLError as error:
                logger.debug("GPU %d does not answer: %s", index, error)
        return tuple(found)

    def _read(self, index: int, handle: Any) -> DeviceUse:
        nvml = self._nvml
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        name = nvml.nvmlDeviceGetName(handle)
        return DeviceUse(index, str(name), busy, int(memory.used), int(memory.total))


def find_devices() -> Devices:
    """The GPUs of this machine; none without driver or bindings (the extra `nvml`)."""
    try:
        import pynvml
    except ImportError:
        return NoDevices()
    try:
        pynvml.nvmlInit()
        return NvmlDevices(pynvml)
    except pynvml.NVMLError as error:
        logger.info("no GPU is watched: %s", error)
        return NoDevices()
