"""Tiny quantised model folders whose tensors tests can change one by one."""

from __future__ import annotations

import json
from pathlib import Path

from expertmesh.families.config_reader import Json
from expertmesh.formats.codec import NUMPY_TYPES, PartData
from expertmesh.json_file import read_json_object
from expertmesh.model_tools.quantize import quantize_model, safetensors_bytes
from expertmesh.safetensors_file import SafetensorsFile
from expertmesh.weight_storage import FileTensor
from tests.support.tiny_folders import Tensors, save_folder

Parts = dict[str, PartData]


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
