"""What images run if a manifest names no command: the ENTRYPOINT of their Dockerfiles."""

from __future__ import annotations

import json
import re
from functools import cache

from tests.support.processes import ROOT

_ENTRYPOINT = re.compile(r"^ENTRYPOINT\s+(\[.*\])\s*$", re.MULTILINE)


@cache
def entrypoint_of(image: str) -> tuple[str, ...]:
    """Of the last stage; empty if we have no such image.

    Args:
        image: e.g. "expertmesh/gateway:0.1.0".
    """
    name = image.rpartition("/")[2].partition(":")[0]
    path = ROOT / "deploy" / "images" / f"{name}.Dockerfile"
    if not path.exists():
        return ()
    found = _ENTRYPOINT.findall(path.read_text())
    return tuple(json.loads(found[-1])) if found else ()
