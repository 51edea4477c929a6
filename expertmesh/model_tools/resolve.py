"""What users may give as MODEL: a folder, or the name of a demo model."""

from __future__ import annotations

from pathlib import Path

from expertmesh.errors import CheckpointError
from expertmesh.model_tools.demo import Variant, ensure_demo_model
from expertmesh.model_tools.progress import Progress

DEMO_NAMES: dict[str, Variant] = {
    "demo": "granular",
    "demo-granular": "granular",
    "demo-plain": "plain",
    "demo-dense": "dense",
}


def resolve_model(model: str, home: Path, progress: Progress) -> Path:
    """Folder of a model; demo models are made on first use.

    Args:
        model: A path, or one of `DEMO_NAMES`.
        home: Data folder for demo models.
        progress: Is told what happens.

    Raises:
        CheckpointError: there is no such folder.
        StartupError: a demo model cannot be made.
    """
    variant = DEMO_NAMES.get(model)
    if variant is not None:
        return ensure_demo_model(home, variant, progress)
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise CheckpointError(
            f"model {model!r}: not a folder",
            fix=f"give a folder with config.json, or one of {', '.join(DEMO_NAMES)}",
        )
    return folder
