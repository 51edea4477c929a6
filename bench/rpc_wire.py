"""What both ends of `bench.rpc` agree on."""

from __future__ import annotations

import struct
from pathlib import Path

from expertmesh.model_tools.progress import NoProgress
from expertmesh.model_tools.resolve import resolve_model
from expertmesh.settings import data_home

ECHO = "/bench.Echo/Echo"
SIZES = struct.Struct("<I")
"""Head of a request to an echo: how many bytes the reply is to have."""
INCARNATION = 0xBE7C
CREDITS = 4096


def demo_folder() -> Path:
    """The demo model: hidden size 576, top-2 of 8 experts."""
    return resolve_model("demo", data_home(), NoProgress())
