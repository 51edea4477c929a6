"""Where gateways of one machine agree who leads. Quick to import."""

from __future__ import annotations

import hashlib
from pathlib import Path

from expertmesh.leader_lock import FileLock
from expertmesh.settings import data_home


def lock_path(lock: FileLock, experts: str) -> Path:
    """The lock file: the same for all gateways here that share expert workers.

    Args:
        lock: Names the file, perhaps.
        experts: Where expert workers are, as settings say it.
    """
    if lock.path:
        return Path(lock.path).expanduser().absolute()
    places = sorted(place.strip() for place in experts.split(","))
    shared = hashlib.sha256(",".join(places).encode())
    return data_home() / "leaders" / f"{shared.hexdigest()[:16]}.lock"
