"""Tiny quantised model folders whose tensors tests can change one by one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from expertmesh.families.config_reader import Json
from expertmesh.formats.codec import NUMPY_TYPES, PartData
from expertmesh.json_file import read_json_object
from expertmesh.model_tools.quantize import quantize_model, safetensors_bytes
from expertmesh.safetensors_file import SafetensorsFile
from expertmesh.weight_storage import FileTensor
from tests.support.tiny_folders import Tensors, save_folder

Parts = dict[str, PartData]

FP8: Json = {"quant_method": "fp8", "weight_block_size": [16, 10]}
ATTENTION_ONLY: Json = {**FP8, "modules_to_not_convert": ["model.layers.*.block_sparse_moe"]}


def compressed(storage: str = "pack-quantized", **weights: object) -> Json:
    """Experts in groups of 8 columns of 4 bits, with changes."""
    usual: Json = {"num_bits": 4, "strategy": "group", "group_size": 8}
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "config_groups": {"g": {"targets": ["Linear"], "weights": usual | weights}},
        "ignore": ["lm_head", "re:.*self_attn"],
    }


INT8 = compressed("int-quantized", num_bits=8, strategy="channel", group_size=None)


def quantized_folder(folder: Path, config: Json, tensors: Tensors, quantization: Json) -> Path:
    """Writes a plain model beside the folder, and into the folder the same quantised."""
    plain = save_folder(folder.with_name(folder.name + "-plain"), config, tensors)
    quantize_model(plain, folder, quantization)
    return folder


def read_parts(folder: Path) -> Parts:
    """Every stored tensor."""
    file = SafetensorsFile(folder / "model.safetensors")
    found = {}
    for name, header in file.tensors.items():
        data = FileTensor(file, name).read(NUMPY_TYPES[header.dtype_code])
        found[name] = PartData(data, header.dtype_code)
    file.close()
    return found


def write_parts(folder: Path, parts: Parts) -> None:
    """Replaces the stored tensors."""
    (folder / "model.safetensors").write_bytes(b"".join(safetensors_bytes(parts)))


def change_config(folder: Path, quantization: Json | None) -> None:
    """Replaces the quantization_config; None takes it away."""
    config = read_json_object(folder / "config.json")
    del config["quantization_config"]
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


Change = Callable[[Parts], None]
"""Of stored tensors, in place."""


def drop(name: str) -> Change:
    """Without a tensor."""
    return lambda parts: parts.__delitem__(name)


def put(name: str, data: npt.NDArray[np.generic], code: str) -> Change:
    """With another tensor."""
    return lambda parts: parts.__setitem__(name, PartData(data, code))


def copy(name: str, new: str) -> Change:
    """With a tensor under a second name."""
    return lambda parts: parts.__setitem__(new, parts[name])


def poke(name: str, value: object) -> Change:
    """With another first element."""
    return lambda parts: parts[name].data.reshape(-1).__setitem__(0, value)


def both(first: Change, second: Change) -> Change:
    """One after the other."""

    def change(parts: Parts) -> None:
        first(parts)
        second(parts)

    return change
