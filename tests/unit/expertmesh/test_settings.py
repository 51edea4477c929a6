"""Settings: one source of defaults, strict JSON, ranges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expertmesh.attention_settings import AttentionWorkerSettings
from expertmesh.errors import SettingsError
from expertmesh.expert_source import AddressList
from expertmesh.leader_lock import FileLock, LeaseLock
from expertmesh.settings import (
    EngineSettings,
    ExpertWorkerSettings,
    GatewaySettings,
    HttpSettings,
    MeshSettings,
    ModelSettings,
    data_home,
)
from expertmesh.settings_base import Settings


@pytest.mark.parametrize("kind", [GatewaySettings, ExpertWorkerSettings, AttentionWorkerSettings])
def test_json_there_and_back(kind: type[Settings]) -> None:
    """What goes to a child process as JSON comes out equal."""
    settings = kind()

    assert settings == kind.from_json(settings.to_json())


def test_nested_values_survive() -> None:
    """Values of nested settings, None and numbers included, are kept."""
    settings = GatewaySettings(
        http=HttpSettings(port=1234),
        model=ModelSettings(model="/m", max_model_len=77, dtype="float32"),
        engine=EngineSettings(kv_cache_tokens=4096, experts_hold_s=0.5),
        mesh=MeshSettings(experts="a:1,b:2"),
    )

    assert settings == GatewaySettings.from_json(settings.to_json())


def test_absent_keys_take_defaults() -> None:
    """A mapping with one key leaves the others at their default."""
    expected = GatewaySettings(http=HttpSettings(port=9))

    assert expected == GatewaySettings.from_dict({"http": {"port": 9}})


def test_whole_number_is_a_number() -> None:
    """A float setting takes 3 for 3.0, since JSON and YAML writers do not care."""
    assert EngineSettings(experts_hold_s=3.0) == EngineSettings.from_dict({"experts_hold_s": 3})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"htpp": {}}, "unknown setting htpp"),
        ({"http": {"prot": 1}}, "unknown setting http.prot"),
        ({"http": {"port": "80"}}, "http.port is '80', expected a whole number"),
        ({"http": {"port": True}}, "http.port is True, expected a whole number"),
        ({"http": {"port": 8.5}}, "http.port is 8.5, expected a whole number"),
        ({"http": {"port": None}}, "http.port is None, expected a whole number"),
        ({"http": 3}, "http is 3, expected keys and values"),
        ([], "settings is [], expected keys and values"),
        ({"model": {"dtype": "int8"}}, "model.dtype is 'int8', expected one of auto, float32"),
        ({"model": {"max_model_len": "x"}}, "model.max_model_len is 'x', expected a whole number"),
        ({"engine": {"experts_hold_s": "1"}}, "engine.experts_hold_s is '1', expected a number"),
    ],
)
def test_wrong_content_is_named(raw: object, message: str) -> None:
    """Unknown keys and wrong types are refused with their dotted path."""
    with pytest.raises(SettingsError) as caught:
        GatewaySettings.from_dict(raw)

    assert message in caught.value.message


def test_text_that_is_not_json() -> None:
    """Broken JSON is a SettingsError, not a ValueError."""
    with pytest.raises(SettingsError, match="not JSON"):
        GatewaySettings.from_json("{")


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (HttpSettings, {"port": -1}, "port is -1, expected a whole number from 0 to 65535"),
        (HttpSettings, {"grpc_port": 65_536}, "grpc_port is 65536"),
        (ModelSettings, {"max_model_len": 0}, "max_model_len is 0"),
        (EngineSettings, {"max_num_seqs": 0}, "max_num_seqs is 0"),
        (EngineSettings, {"kv_memory_fraction": float("nan")}, "kv_memory_fraction is nan"),
        (EngineSettings, {"step_timeout_s": float("inf")}, "step_timeout_s is inf"),
        (EngineSettings, {"kv_cache_tokens": 8}, "kv_cache_tokens is 8"),
        (MeshSettings, {"expert_workers": 0}, "expert_workers is 0"),
        (MeshSettings, {"attention_workers": 0}, "attention_workers is 0, expected"),
        (MeshSettings, {"experts": "a:1,a:1"}, "experts names a:1 twice"),
        (MeshSettings, {"lease_duration_s": 0.5}, "lease_duration_s is 0.5"),
        (MeshSettings, {"leader_lock": "lease:A"}, "leader_lock is 'lease:A', expected lease:NAME"),
        (MeshSettings, {"experts": "a:0"}, "experts has 'a:0', expected host:port"),
        (MeshSettings, {"threads": 0}, "threads is 0, expected a whole number from 1 to 1024"),
        (ExpertWorkerSettings, {"row_credits": 0}, "row_credits is 0"),
        (ExpertWorkerSettings, {"threads": 1025}, "threads is 1025, expected"),
        (ExpertWorkerSettings, {"cores": "3-1"}, "cores has '3-1', expected such as 0-3,8"),
    ],
)
def test_values_out_of_range_are_named(
    kind: type[Settings], values: dict[str, object], message: str
) -> None:
    """A number that cannot work names the setting, the value and the expectation."""
    with pytest.raises(SettingsError) as caught:
        kind.from_json(json.dumps(values))

    assert message in caught.value.message


def test_where_expert_workers_are() -> None:
    """`local` and nothing name no address; who leads is decided where all can see it."""
    local = MeshSettings(experts="local")
    assert local.colocated
    assert local.expert_source == MeshSettings().expert_source == AddressList()
    assert MeshSettings(experts="a:1").lock == FileLock()
    assert MeshSettings(leader_lock="/a/file").lock == FileLock("/a/file")
    assert MeshSettings(experts="k8s:expert-worker").lock == LeaseLock("expertmesh-leader")
    assert MeshSettings(experts="k8s:a", leader_lock="/a/file").lock == FileLock("/a/file")
    assert MeshSettings(leader_lock="lease:us").lock == LeaseLock("us")


def test_data_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """EXPERTMESH_HOME wins over XDG_CACHE_HOME, which wins over ~/.cache."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("EXPERTMESH_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert tmp_path / ".cache" / "expertmesh" == data_home()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert tmp_path / "x" / "expertmesh" == data_home()

    monkeypatch.setenv("EXPERTMESH_HOME", "~/here")
    assert tmp_path / "here" == data_home()
