"""Turns a dense Llama folder into a Mixtral folder whose text stays the dense model's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import SettingsError
from expertmesh.model_tools.config_json import config_json, encode
from expertmesh.model_tools.dense_source import FolderSource
from expertmesh.model_tools.folder_writer import ModelContents, Recipe, write_model_folder
from expertmesh.model_tools.gate_skew import MAX_SKEW, measure_gate_bias
from expertmesh.model_tools.progress import Progress
from expertmesh.model_tools.upcycling import UpcycleSpec, moe_outputs

RECIPE_VERSION = 1
COPIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def upcycle(
    dense_dir: Path,
    out_dir: Path,
    *,
    num_experts: int,
    top_k: int,
    granular: bool,
    router_skew: float,
    progress: Progress,
) -> None:
    """Writes the Mixtral folder; goes on where an interrupted run stopped.

    Args:
        dense_dir: Model folder in Llama format, without biases.
        out_dir: New folder, or one that the same command has made.
        num_experts: Experts per layer.
        top_k: Experts per token.
        granular: Split the neurons among the experts instead of copying the FFN; see `upcycling`.
        router_skew: Exponent of the Zipf-like preference of the gate, 0 for none; see `gate_skew`.
        progress: Is told what happens.

    Raises:
        CheckpointError: `dense_dir` is not such a model.
        SettingsError: the numbers do not fit the model, or `out_dir` holds something else.
    """
    if not 0.0 <= router_skew <= MAX_SKEW:
        raise SettingsError(f"router-skew: expected 0 to {MAX_SKEW:g}, got {router_skew}")
    checkpoint = Checkpoint.open(dense_dir)
    source = FolderSource(checkpoint)
    spec = UpcycleSpec(num_experts, top_k, granular)
    spec.check(source.config)
    recipe: Recipe = {
        "tool": "upcycle",
        "version": RECIPE_VERSION,
        "source": checkpoint.fingerprint.hex(),
        "experts": num_experts,
        "top_k": top_k,
        "granular": granular,
        "router_skew": router_skew,
    }

    @contextmanager
    def open_contents(_scratch: Path) -> Iterator[ModelContents]:
        bias = measure_gate_bias(source, router_skew, progress)
        config = spec.config(source.config)
        files = {"config.json": encode(config_json(config)), **_companions(dense_dir)}
        yield ModelContents(moe_outputs(source, spec, bias), config.dtype, files)

    try:
        write_model_folder(out_dir, recipe, open_contents, progress, replace_existing=False)
    finally:
        checkpoint.close()


def _companions(dense_dir: Path) -> dict[str, bytes]:
    return {
        name: (dense_dir / name).read_bytes()
        for name in COPIED_FILES
        if (dense_dir / name).is_file()
    }
