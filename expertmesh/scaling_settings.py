"""Settings of who asks for more or fewer expert workers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from expertmesh.errors import SettingsError
from expertmesh.settings_base import Settings, check_float, check_int

Autoscale = Literal["off", "on"]

_TARGET = re.compile(r"statefulset/([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)")


@dataclass(frozen=True)
class ScalingSettings(Settings):
    """How many expert workers a cluster is asked for."""

    autoscale: Autoscale = "off"
    """on: the gateway that leads asks Kubernetes for more expert workers when these are busy or
    calls wait for them, and for fewer when they have long been idle."""
    scale_target: str = "statefulset/expert-worker"
    """StatefulSet of the expert workers, in the gateway's namespace; nothing else may scale it."""
    min_expert_workers: int = 2
    """Fewest expert workers that are asked for; more where `min_copies` needs them."""
    max_expert_workers: int = 8
    """Most expert workers that are asked for."""
    scale_up_wait_ms: float = 50.0
    """More expert workers are asked for early if 1 of 20 calls waits for longer than this."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        check_int("min_expert_workers", self.min_expert_workers, 1, 4096)
        check_int("max_expert_workers", self.max_expert_workers, self.min_expert_workers, 4096)
        check_float("scale_up_wait_ms", self.scale_up_wait_ms, 0.1, 60_000.0)
        _ = self.target_name

    @property
    def target_name(self) -> str:
        """Name of the StatefulSet."""
        if match := _TARGET.fullmatch(self.scale_target):
            return match[1]
        raise SettingsError(
            f"scale_target is {self.scale_target!r}, expected such as statefulset/expert-worker"
        )
