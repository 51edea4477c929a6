"""What users may give as MODEL: a folder, a demo model, or a model of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from expertmesh.errors import CheckpointError
from expertmesh.model_tools.demo import Variant, ensure_demo_model
from expertmesh.model_tools.hub import ensure_hub_model, parse_hub_model
from expertmesh.model_tools.progress import Progress

DEMO_NAMES: dict[str, Variant] = {
    "demo": "granular",
    "demo-granular": "granular",
    "demo-plain": "plain",
    "demo-dense": "dense",
}


def resolve_model(model: str, home: Path, progress: Progress) -> Path:
    """Folder of a model; demo models are made on first use, those of the hub downloaded.

    Args:
        model: A path, one of `DEMO_NAMES`, or ORGANISATION/NAME[@REVISION]; a folder comes first.
        home: Data folder for demo models.
        progress: Is told what happens.

    Raises:
        CheckpointError: there is no such folder or model.
        StartupError: a demo model cannot be made, or a model not be downloaded.
    """
    variant = DEMO_NAMES.get(model)
    if variant is not None:
        return ensure_demo_model(home, variant, progress)
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if (hub_model := parse_hub_model(model)) is not None:
            return ensure_hub_model(hub_model, progress)
        raise CheckpointError(
            f"model {model!r}: not a folder",
            fix="give a folder with config.json, ORGANISATION/NAME of the Hugging Face hub, "
            f"or one of {', '.join(DEMO_NAMES)}",
        )
    return folder
