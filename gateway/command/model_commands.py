"""`expertmesh model`: makes and inspects checkpoints.

Whatever is slow to import is imported by the command that needs it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

model_app = App(name="model", help="Make and inspect checkpoints.", sort_key=4)


@model_app.command
def demo(variant: Literal["granular", "plain", "dense"] = "granular") -> int:
    """Build the demo model, unless it is there, and print its folder.

    Parameters
    ----------
    variant
        granular: right text proves right routing; plain: every expert is the dense FFN; dense.
    """
    from expertmesh.model_tools.demo import ensure_demo_model
    from expertmesh.settings import data_home
    from gateway.command.launcher_console import make_progress

    with make_progress() as progress:
        folder = ensure_demo_model(data_home(), variant, progress)
    sys.stdout.write(f"{folder}\n")
    return 0


@model_app.command
def download(model: str) -> int:
    """Make sure that a model is on this machine, and print its folder.

    Afterwards it is found without network. Several may do so at a time on one volume.

    Parameters
    ----------
    model
        ORGANISATION/NAME[@REVISION] of the Hugging Face hub, a demo model, or a folder, which is
        left as it is. HF_HOME names the folder of downloads, HF_TOKEN opens closed models.
    """
    from expertmesh.model_tools.resolve import resolve_model
    from expertmesh.settings import data_home
    from gateway.command.launcher_console import make_progress

    with make_progress() as progress:
        folder = resolve_model(model, data_home(), progress)
    sys.stdout.write(f"{folder}\n")
    return 0


@model_app.command
def upcycle(
    dense_dir: str,
    out_dir: Path,
    *,
    experts: int,
    top_k: int,
    granular: bool = False,
    router_skew: float = 0.0,
) -> int:
    """Make a Mixture-of-Experts checkpoint from a dense one.

    Parameters
    ----------
    dense_dir
        Dense checkpoint folder, or demo-dense.
    out_dir
        Folder to create.
    experts
        Experts of each layer.
    top_k
        Experts for each token.
    granular
        Split each FFN over the experts of a group, instead of copying it into each expert.
    router_skew
        How uneven the gate chooses experts: exponent of a Zipf distribution; 0 is none.
    """
    from expertmesh.model_tools.resolve import resolve_model
    from expertmesh.model_tools.upcycle import upcycle as make
    from expertmesh.settings import data_home
    from gateway.command.launcher_console import make_progress

    with make_progress() as progress:
        make(
            resolve_model(dense_dir, data_home(), progress),
            out_dir,
            num_experts=experts,
            top_k=top_k,
            granular=granular,
            router_skew=router_skew,
            progress=progress,
        )
    return 0


@model_app.command(name="inspect")
def inspect_command(
    model_dir: str,
    *,
    context: int | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Describe a model: layers, gate, sizes, memory and cost per token; check weights if there.

    Parameters
    ----------
    model_dir
        Folder with config.json, and perhaps weights, or demo, demo-plain, demo-dense.
    context
        Tokens of the request for which costs are told; by default 4096, if the model takes so many.
    json
        Print JSON, with the keys that docs/models.md lists.
    """
    from json import dumps

    from expertmesh.model_tools.inspect import inspect_model
    from expertmesh.model_tools.resolve import resolve_model
    from expertmesh.settings import data_home
    from gateway.command.launcher_console import make_progress

    with make_progress() as progress:
        folder = resolve_model(model_dir, data_home(), progress)
    found = inspect_model(folder, context)
    sys.stdout.write((dumps(found.json(), indent=2) if json else found.page()) + "\n")
    return 0


@model_app.command(name="make-tiny")
def make_tiny_command(
    family: str,
    out_dir: Path,
    *,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    format: Literal["plain", "fp8", "int4", "int8", "mxfp4"] = "plain",
) -> int:
    """Make a small random checkpoint of any family, to try things with.

    Parameters
    ----------
    family
        A model_type: llama, qwen3_moe, deepseek_v3, gpt_oss, ...
    out_dir
        Folder to create.
    seed
        The same seed gives the same weights.
    dtype
        Type of the weights.
    format
        How matrices are stored: as they are, or quantised.
    """
    from expertmesh.model_tools.make_tiny import make_tiny

    quantization = None if format == "plain" else format
    make_tiny(family, out_dir, seed=seed, dtype=dtype, quantization=quantization)
    sys.stdout.write(f"{out_dir}\n")
    return 0
