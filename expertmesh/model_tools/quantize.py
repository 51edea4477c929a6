"""Stores a small plain model in a quantised format, to try the format with.

Codes are the nearest ones and scales fit the largest value: nothing is calibrated. The whole model
is in memory at once.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from expertmesh.errors import CheckpointError
from expertmesh.families import FAMILIES, load_model_config
from expertmesh.families.config_reader import ConfigReader, Json
from expertmesh.formats.codec import NUMPY_TYPES, Codec, PartData
from expertmesh.formats.encode import encode
from expertmesh.formats.parse import parse_quantization
from expertmesh.formats.storage import QuantizedStorage
from expertmesh.host_tensor import Float32, to_float32
from expertmesh.inventory import take_inventory
from expertmesh.json_file import read_json_object
from expertmesh.safetensors_file import SafetensorsFile, pread_into
from expertmesh.shards import INDEX_FILE, SINGLE_FILE, open_shards
from expertmesh.weight_storage import PLAIN, FileTensor, StoredWeight, TensorFiles, Weight

_GROUP = 8
"""Columns per scale; small models have few columns."""
_KEPT = ["lm_head", "re:.*self_attn.*"]


def _compressed(storage: str, bits: int, strategy: str, activations: Json | None) -> Json:
    weights: Json = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": strategy,
        "group_size": _GROUP if strategy == "group" else None,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": storage,
        "config_groups": {"group_0": group},
        "ignore": _KEPT,
    }


QUANTIZATIONS: Mapping[str, Json] = {
    "fp8": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [_GROUP, _GROUP],
    },
    "int4": _compressed("pack-quantized", 4, "group", None),
    "int8": _compressed(
        "int-quantized",
        8,
        "channel",
        {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
    ),
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}
"""Name of a format to the `quantization_config` of its small models."""


def quantize_model(source: Path, folder: Path, quantization_config: Json) -> None:
    """Writes the model of a folder into another one, quantised.

    Args:
        source: A plain model.
        folder: Made if needed; files of these names are replaced.
        quantization_config: What `config.json` is to say.

    Raises:
        CheckpointError: the config or the model is not supported, or a weight does not fit.
    """
    raw = read_json_object(source / "config.json") | {"quantization_config": quantization_config}
    quantization = parse_quantization(ConfigReader(folder / "config.json", raw))
    files = open_shards(source, pread_into)
    storage = QuantizedStorage(quantization)
    codecs = {weight.name: storage.codec_of(weight) for weight in _weights(source, files)}
    if not any(codecs.values()):
        raise CheckpointError(
            f"{source}: no weight of this model is stored so: {quantization_config}",
            fix="choose another format",
        )
    tensors: dict[str, PartData] = {}
    for name, file in files.items():
        tensors |= _stored(FileTensor(file, name), codecs.get(name))
    folder.mkdir(parents=True, exist_ok=True)
    _copy_other_files(source, folder)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    with (folder / SINGLE_FILE).open("wb") as out:
        out.writelines(safetensors_bytes(tensors))


def _weights(source: Path, files: Mapping[str, SafetensorsFile]) -> list[Weight]:
    config = load_model_config(source)
    recorder = _Recorder()
    take_inventory(config, FAMILIES[config.family], recorder, files)
    return recorder.weights


@dataclass
class _Recorder:
    """Plain storage that notes which weights there are. A `WeightStorage`."""

    weights: list[Weight] = field(default_factory=list)

    def holds(self, weight: Weight, files: TensorFiles) -> bool:
        return PLAIN.holds(weight, files)

    def take(self, weight: Weight, files: TensorFiles) -> StoredWeight:
        self.weights.append(weight)
        return PLAIN.take(weight, files)


def _stored(tensor: FileTensor, codec: Codec | None) -> dict[str, PartData]:
    """A tensor as it is to be stored, by name."""
    if codec is None:
        code = tensor.header.dtype_code
        return {tensor.name: PartData(tensor.read(NUMPY_TYPES[code]), code)}
    weight = _as_float32(tensor)
    matrices = weight if weight.ndim == 3 else weight[None]
    if codec.transposed:
        matrices = np.ascontiguousarray(matrices.transpose(0, 2, 1))
    try:
        parts = codec.parts(matrices.shape if weight.ndim == 3 else matrices.shape[1:])
    except ValueError as error:
        raise CheckpointError(f"{tensor.path}: tensor {tensor.name}: {error}") from error
    encoded = [encode(codec, matrix) for matrix in matrices]
    return {
        tensor.name + part.suffix: PartData(
            np.stack([entry[i].data for entry in encoded]).reshape(part.shape),
            encoded[0][i].dtype_code,
        )
        for i, part in enumerate(parts)
    }


def _as_float32(tensor: FileTensor) -> Float32:
    weight = PLAIN.take(
        Weight(tensor.name, tensor.header.shape, ""), TensorFiles({tensor.name: tensor.file})
    )
    return to_float32(weight.read(), weight.dtype)


def _copy_other_files(source: Path, folder: Path) -> None:
    for path in source.iterdir():
        weights = path.suffix == ".safetensors" or path.name == INDEX_FILE
        if path.is_file() and not weights and path.name != "config.json":
            shutil.copyfile(path, folder / path.name)


def safetensors_bytes(tensors: Mapping[str, PartData]) -> Iterator[bytes]:
    """The bytes of a safetensors file; wide types first, so that all data is aligned."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    by_width = sorted(tensors.items(), key=lambda item: -item[1].data.itemsize)
    for name, part in by_width:
        start, end = end, end + part.data.nbytes
        header[name] = {
            "dtype": part.dtype_code,
            "shape": list(part.data.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for _, part in by_width:
        yield part.data.tobytes()
