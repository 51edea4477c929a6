"""What cannot be started gets one clear line and the documented exit code, quickly."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.conftest import Models
from tests.support.mesh import COMMAND
from tests.support.processes import run
from tests.support.tiny_checkpoints import MIXTRAL_FOUR

BAD_SETTING = 2
BAD_CHECKPOINT = 3
BAD_PORT = 4
QUICK_S = 10.0
"""Generous for a busy machine; alone it takes about a second."""

FREE_PORTS = {"EXPERTMESH_PORT": "0", "EXPERTMESH_GRPC_PORT": "0"}
"""The default ports may be in use on the machine that tests; flags go before the environment."""

Damage = Callable[[Path], None]


@pytest.fixture
def checkpoint(models: Models, tmp_path: Path) -> Path:
    """A copy of a tiny Mixtral, to be damaged."""
    return shutil.copytree(models.tiny(MIXTRAL_FOUR), tmp_path / "model")


def _fails(*arguments: str, exit_code: int, mentions: tuple[str, ...]) -> str:
    """Runs a command that must fail with this code and one line that mentions all of these."""
    started = time.monotonic()
    result = run([*COMMAND, *arguments], timeout_s=60, env=FREE_PORTS)
    assert time.monotonic() - started < QUICK_S
    assert exit_code == result.returncode, result.stderr
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, result.stderr
    for mention in mentions:
        assert mention in lines[0]
    return lines[0]


def _edit_config(**changes: object) -> Damage:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        config = {**json.loads(path.read_text()), **changes}
        kept = {key: value for key, value in config.items() if value != "REMOVE"}
        path.write_text(json.dumps(kept))

    return edit


def _edit_tensors(edit: Callable[[dict[str, np.ndarray]], None]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return damage


def _write(name: str, data: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(data) and None


def _remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def _cut(length: int) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:length])

    return damage


def _extend(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\x00" * 100)


GATE = "model.layers.1.block_sparse_moe.gate.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1.weight"


def _missing(tensors: dict[str, np.ndarray]) -> None:
    del tensors[EXPERT]


def _extra(tensors: dict[str, np.ndarray]) -> None:
    tensors["model.layers.9.surprise.weight"] = np.zeros((2, 2), np.float32)


def _misshapen(tensors: dict[str, np.ndarray]) -> None:
    tensors[GATE] = tensors[GATE][:, 1:].copy()


def _wrong_type(tensors: dict[str, np.ndarray]) -> None:
    tensors[GATE] = tensors[GATE].astype(np.int32)


def _escaping_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    names = load_file(folder.parent / "outside.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../outside.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _missing_shard(folder: Path) -> None:
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-1-of-2.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


DAMAGES: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "no config": (_remove("config.json"), ("config.json",)),
    "config is not JSON": (_write("config.json", b"{"), ("config.json",)),
    "config is a list": (_write("config.json", b"[]"), ("config.json",)),
    "no weights": (_remove("model.safetensors"), ("safetensors",)),
    "empty weights": (_cut(0), ("model.safetensors",)),
    "cut in the header": (_cut(100), ("model.safetensors",)),
    "cut in the data": (_cut(60_000), ("model.safetensors",)),
    "bytes too many": (_extend, ("model.safetensors",)),
    "huge header": (
        _write("model.safetensors", struct.pack("<Q", 2**62) + b"{}"),
        ("model.safetensors",),
    ),
    "pickle": (_write("model.safetensors", b"\x80\x04\x95" + b"\x00" * 64), ("model.safetensors",)),
    "missing tensor": (_edit_tensors(_missing), (EXPERT,)),
    "extra tensor": (_edit_tensors(_extra), ("model.layers.9.surprise.weight",)),
    "misshapen tensor": (_edit_tensors(_misshapen), (GATE,)),
    "integer tensor": (_edit_tensors(_wrong_type), (GATE,)),
    "index leaves the folder": (_escaping_index, ("../outside.safetensors",)),
    "index names a missing shard": (_missing_shard, ("model-1-of-2.safetensors",)),
    "unsupported family": (_edit_config(model_type="mamba9"), ("mamba9", "mixtral", "llama")),
    "remote code": (
        _edit_config(model_type="own", auto_map={"AutoModelForCausalLM": "evil.Model"}),
        ("own",),
    ),
    "no family": (_edit_config(model_type="REMOVE"), ("model_type",)),
    "a billion layers": (_edit_config(num_hidden_layers=10**9), ("num_hidden_layers",)),
    "no experts": (_edit_config(num_local_experts=0), ("num_local_experts",)),
    "top-k above experts": (_edit_config(num_experts_per_tok=5), ("num_experts_per_tok",)),
    "negative size": (_edit_config(hidden_size=-64), ("hidden_size",)),
    "size in words": (_edit_config(hidden_size="big"), ("hidden_size",)),
    "heads do not divide": (_edit_config(num_key_value_heads=3), ("num_key_value_heads",)),
    "eps is NaN": (_edit_config(rms_norm_eps=float("nan")), ("config.json", "NaN")),
    "eps is negative": (_edit_config(rms_norm_eps=-1e-5), ("rms_norm_eps",)),
    "unknown activation": (_edit_config(hidden_act="mystery"), ("hidden_act", "mystery")),
}


@pytest.mark.parametrize(("damage", "mentions"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_checkpoint(checkpoint: Path, damage: Damage, mentions: tuple[str, ...]) -> None:
    """A model folder with one fault: the line names the file or tensor and what is wrong."""
    damage(checkpoint)
    _fails("serve", str(checkpoint), exit_code=BAD_CHECKPOINT, mentions=mentions)


@pytest.mark.parametrize("command", ["expert-worker", "gateway"])
def test_other_commands_check_the_checkpoint_too(checkpoint: Path, command: str) -> None:
    """Expert worker and gateway refuse a damaged model folder as `serve` does."""
    _edit_tensors(_missing)(checkpoint)
    experts = ["--experts", "127.0.0.1:1"] if command == "gateway" else []
    arguments = [command, str(checkpoint), *experts, "--port", "0"]
    _fails(*arguments, exit_code=BAD_CHECKPOINT, mentions=(EXPERT,))


NO_CERTIFICATES = tuple(
    word for kind in ("cert", "key", "ca") for word in (f"--tls-{kind}-file", __file__)
)


@pytest.mark.parametrize("model", ["/nowhere/at/all", "no-such-model"])
def test_missing_folder(model: str) -> None:
    """A folder that is not there is named."""
    _fails("serve", model, exit_code=BAD_CHECKPOINT, mentions=(model,))


def test_file_instead_of_folder(tmp_path: Path) -> None:
    """A file is not a model folder."""
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    path = str(tmp_path / "weights.gguf")
    _fails("serve", path, exit_code=BAD_CHECKPOINT, mentions=(path,))


@pytest.mark.parametrize(
    ("flags", "mentions"),
    [
        (("--dtype", "float99"), ("dtype", "float99")),
        (("--port", "70000"), ("port", "70000")),
        (("--port", "http"), ("port", "http")),
        (("--expert-workers", "0"), ("expert", "0")),
        (("--expert-workers", "-1"), ("expert", "-1")),
        (("--max-model-len", "0"), ("max", "0")),
        (("--max-model-len", "513"), ("max", "513", "512")),
        (("--experts", "nonsense"), ("experts", "nonsense")),
        (("--experts", "127.0.0.1:99999"), ("experts", "99999")),
        (("--no-such-flag", "1"), ("--no-such-flag",)),
        (("--config", "/nowhere.yaml"), ("/nowhere.yaml",)),
    ],
    ids=lambda value: " ".join(value),
)
def test_bad_flags(checkpoint: Path, flags: tuple[str, ...], mentions: tuple[str, ...]) -> None:
    """A flag with a value that cannot work is named with its value."""
    _fails("serve", str(checkpoint), *flags, exit_code=BAD_SETTING, mentions=mentions)


@pytest.mark.parametrize(
    ("flags", "mentions"),
    [
        (("--experts", "7/3"), ("7/3",)),
        (("--experts", "0-99"), ("99",)),
        (("--experts", "some"), ("some",)),
        (NO_CERTIFICATES, ("--tls-cert-file", __file__)),
    ],
    ids=lambda value: " ".join(value),
)
def test_bad_flags_of_an_expert_worker(
    checkpoint: Path, flags: tuple[str, ...], mentions: tuple[str, ...]
) -> None:
    """A share or an expert that the model does not have is named, and so are files."""
    arguments = ["expert-worker", str(checkpoint), "--port", "0", *flags]
    _fails(*arguments, exit_code=BAD_SETTING, mentions=mentions)


def test_bad_environment_and_file(checkpoint: Path, tmp_path: Path) -> None:
    """A wrong value in the environment or in the configuration file is named as such."""
    environment = {**FREE_PORTS, "EXPERTMESH_MAX_NUM_SEQS": "many"}
    result = run([*COMMAND, "serve", str(checkpoint)], env=environment, timeout_s=60)
    assert result.returncode == BAD_SETTING, result.stderr
    assert "many" in result.stderr
    (tmp_path / "c.yaml").write_text("max-num-seqs: 4\nno-such-key: 1\n")
    config = str(tmp_path / "c.yaml")
    arguments = ["serve", str(checkpoint), "--config", config]
    _fails(*arguments, exit_code=BAD_SETTING, mentions=("no-such-key",))


@pytest.mark.parametrize(
    ("command", "flag", "others"),
    [
        ("serve", "--port", ("--grpc-port", "0")),
        ("serve", "--grpc-port", ("--port", "0")),
        ("expert-worker", "--port", ()),
    ],
)
def test_port_in_use(checkpoint: Path, command: str, flag: str, others: tuple[str, ...]) -> None:
    """A port that somebody else listens on is named."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        arguments = [command, str(checkpoint), *others, flag, port]
        _fails(*arguments, exit_code=BAD_PORT, mentions=(port,))


def test_address_that_is_not_ours(checkpoint: Path) -> None:
    """An address of another machine cannot be bound, and is named."""
    arguments = ["serve", str(checkpoint), "--host", "203.0.113.7", "--insecure"]
    _fails(*arguments, exit_code=BAD_PORT, mentions=("203.0.113.7",))


def test_traceback_only_on_request(checkpoint: Path) -> None:
    """EXPERTMESH_DEBUG=1 shows where a start-up error comes from."""
    _remove("config.json")(checkpoint)
    environment = {**FREE_PORTS, "EXPERTMESH_DEBUG": "1"}
    result = run([*COMMAND, "serve", str(checkpoint)], env=environment, timeout_s=60)
    assert result.returncode == BAD_CHECKPOINT
    assert "Traceback" in result.stderr
