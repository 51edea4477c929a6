"""By what gateways that share expert workers agree who leads: what `--leader-lock` can say."""

from __future__ import annotations

from dataclasses import dataclass

from expertmesh.errors import SettingsError
from expertmesh.expert_source import ExpertSource, KubernetesService, is_name

LEASE_PREFIX = "lease:"
DEFAULT_LEASE = "expertmesh-leader"


@dataclass(frozen=True)
class FileLock:
    """A file of this machine that the leader keeps locked."""

    path: str = ""
    """Empty: one for all gateways that look for expert workers in the same place."""


@dataclass(frozen=True)
class LeaseLock:
    """A Lease of Kubernetes, in the gateways' own namespace."""

    name: str


def parse_lock(text: str, experts: ExpertSource) -> FileLock | LeaseLock:
    """What `--leader-lock` says. Raises SettingsError.

    Args:
        text: The setting; empty for the default, which gateways in different pods can share if
            their expert workers are found by Kubernetes.
        experts: Where expert workers are looked for.
    """
    if not text and isinstance(experts, KubernetesService):
        return LeaseLock(DEFAULT_LEASE)
    if not text.startswith(LEASE_PREFIX):
        return FileLock(text)
    name = text.removeprefix(LEASE_PREFIX)
    if not is_name(name):
        raise SettingsError(
            f"leader_lock is {text!r}, expected lease:NAME of lower-case letters, digits and dashes"
        )
    return LeaseLock(name)
