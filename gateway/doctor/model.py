"""The checkpoint: is it there and whole, and does it fit? Nothing is downloaded or loaded."""

from __future__ import annotations

import os
from pathlib import Path

from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import CheckpointError, StartupError
from expertmesh.host_memory import available_host_memory
from expertmesh.model_tools.progress import NoProgress
from expertmesh.model_tools.resolve import DEMO_NAMES, resolve_model
from gateway.doctor.finding import Finding, broken, fine, warning

_GIB = 2**30


def check_model(model: str, home: Path) -> tuple[Checkpoint | None, list[Finding]]:
    """The checkpoint, if it is here and can be served, and what is to be said about it.

    Args:
        model: What a user calls MODEL, as for `serve`.
        home: Data folder.
    """
    variant = DEMO_NAMES.get(model)
    if variant is not None and not (home / "models" / f"demo-{variant}").is_dir():
        fix = "nothing: the first `serve` makes it, from a package of 0.1 GB"
        return None, [warning("model", f"{model} was not made yet", fix)]
    os.environ["HF_HUB_OFFLINE"] = "1"  # before its library is imported, which reads it once
    try:
        checkpoint = Checkpoint.open(resolve_model(model, home, NoProgress()))
    except CheckpointError as error:
        return None, [broken("model", error.message, error.fix or "give another model")]
    except StartupError as error:
        fix = "nothing, if the first start may download it"
        return None, [warning("model", error.message, fix)]
    return checkpoint, [fine("model", _described(checkpoint)), _room(checkpoint)]


def _described(checkpoint: Checkpoint) -> str:
    config = checkpoint.config
    experts = f"{len(config.moe_layers)} layers of {config.num_experts} experts"
    return f"{checkpoint.name} in {checkpoint.model_dir}, {config.dtype}, {experts}"


def _room(checkpoint: Checkpoint) -> Finding:
    files = Path(checkpoint.model_dir).glob("*.safetensors")
    size, left = sum(file.stat().st_size for file in files), available_host_memory()
    message = f"{size / _GIB:.1f} GiB of weights, {left / _GIB:.1f} GiB of memory here"
    if size > left:
        fix = "put expert workers on more machines, or use --expert-dtype int8"
        return warning("model size", message, fix)
    return fine("model size", message)
