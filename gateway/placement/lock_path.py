"""Where gateways of one machine agree who leads. Quick to import."""

from __future__ import annotations

import hashlib
from pathlib import Path

from expertmesh.settings import MeshOptions, data_home


def lock_path(mesh: MeshOptions) -> Path:
    """The lock file: the same for all gateways here that share expert workers.

    Args:
        mesh: Names the file, or where expert workers are.
    """
    if mesh.leader_lock:
        return Path(mesh.leader_lock).expanduser().absolute()
    places = sorted(place.strip() for place in mesh.experts.split(","))
    shared = hashlib.sha256(",".join(places).encode())
    return data_home() / "leaders" / f"{shared.hexdigest()[:16]}.lock"
