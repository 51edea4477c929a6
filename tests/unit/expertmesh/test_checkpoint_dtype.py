"""The type of a model: what `config.json` says, else that of its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expertmesh.checkpoint import Checkpoint
from expertmesh.families import load_model_config
from expertmesh.model_config import DtypeName
from expertmesh.model_tools.inspect import inspect_model
from expertmesh.model_tools.make_tiny import make_tiny
from expertmesh.model_tools.quantize import QUANTIZATIONS
from tests.support.hub_families import MODEL_TYPES


def _say(folder: Path, **dtypes: str | None) -> None:
    """Replaces what the config says of the type."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("dtype", None)
    path.write_text(json.dumps(config | dtypes))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_config_that_names_no_type(model_type: str, dtype: DtypeName, tmp_path: Path) -> None:
    """Files of gpt-oss are like that; some say null."""
    folder = tmp_path / "model"
    make_tiny(model_type, folder, dtype=dtype)
    for said in ({}, {"torch_dtype": None}, {"dtype": None}):
        _say(folder, **said)
        checkpoint = Checkpoint.open(folder)
        assert checkpoint.config.dtype == dtype
        assert inspect_model(folder).json()["dtype"] == dtype
        assert checkpoint.config == Checkpoint.open(folder).config


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_what_the_config_says_counts_first(key: str, tmp_path: Path) -> None:
    """Weights may be stored in another type than the one to compute in."""
    folder = tmp_path / "model"
    make_tiny("gpt_oss", folder, dtype="float32")
    _say(folder, **{key: "float16"})
    assert Checkpoint.open(folder).config.dtype == "float16"


@pytest.mark.parametrize("format_name", QUANTIZATIONS)
def test_quantised_weights_are_served_as_the_plain_ones_beside_them(
    format_name: str, tmp_path: Path
) -> None:
    """Codes have no type to compute in."""
    folder = tmp_path / "model"
    make_tiny("gpt_oss" if format_name == "mxfp4" else "mixtral", folder, dtype="bfloat16",
              quantization=format_name)  # fmt: skip
    _say(folder)
    assert Checkpoint.open(folder).config.dtype == "bfloat16"


def test_config_alone_that_names_no_type(tmp_path: Path) -> None:
    """What released files hold, where they are known to say nothing; else FP32."""
    for model_type, dtype in (("gpt_oss", "bfloat16"), ("llama", "float32")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        assert load_model_config(tmp_path).dtype == dtype
