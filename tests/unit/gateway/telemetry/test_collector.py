"""Use of experts, processes and devices, as Prometheus gets them."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from prometheus_client.core import Metric

from expertmesh.process_usage import ProcessUsage, usage_of
from gateway.telemetry.collector import TelemetryCollector
from gateway.telemetry.devices import Devices, DeviceUse, NoDevices, NvmlDevices, find_devices
from gateway.telemetry.telemetry import Telemetry
from tests.support.seen_mesh import OneDevice, SeenMesh


def _samples(telemetry: Telemetry, devices: Devices | None = None) -> dict[str, Metric]:
    return {metric.name: metric for metric in TelemetryCollector(telemetry, devices).collect()}


def _values(metric: Metric, *labels: str) -> dict[tuple[str, ...], float]:
    return {
        tuple(sample.labels[name] for name in labels): sample.value for sample in metric.samples
    }


def test_use_of_experts() -> None:
    """Of each layer: how uneven, how many are idle, and the three most used."""
    seen = SeenMesh()
    telemetry = Telemetry(seen.sources())
    seen.rows_LE += [[40, 20, 0, 20], [10, 10, 10, 10]]
    seen.pairs = {"w0": {1: 30, 3: 10}, "w1": {1: 10, 3: 10}}
    found = _samples(telemetry)
    assert _values(found["moe_expert_imbalance_ratio"], "layer", "scope") == {
        ("1", "expert"): 2,
        ("3", "expert"): 1,
        ("1", "worker"): 1.5,
        ("3", "worker"): 1,
    }
    assert _values(found["moe_dead_experts"], "layer") == {("1",): 1, ("3",): 0}
    evenness = _values(found["moe_expert_load_entropy"], "layer")
    assert evenness[("1",)] == pytest.approx(0.75)
    rates = _values(found["moe_hot_expert_tokens_rate"], "layer", "rank", "expert")
    assert [key for key in rates if key[0] == "1"] == [
        ("1", "1", "0"),
        ("1", "2", "1"),
        ("1", "3", "3"),
    ]
    assert rates["1", "1", "0"] == pytest.approx(2 * rates["1", "2", "1"])


def test_who_is_slow() -> None:
    """1 for that one, 0 for all others."""
    seen = SeenMesh()
    telemetry = Telemetry(seen.sources())
    for name, seconds in (("w0", 0.1), ("w1", 2.0)):
        seen.call(name, calls=100, rows_back=100, round_trip_s=seconds)
    slow = _values(_samples(telemetry)["moe_worker_straggler"], "worker")
    assert slow == {("w0",): 0, ("w1",): 1}


def test_processes() -> None:
    """This one, and what expert workers tell of themselves."""
    found = _samples(Telemetry(SeenMesh().sources()))
    memory = _values(found["moe_process_resident_memory_bytes"], "process")
    assert memory["w0",] == memory["w1",] == 1 << 20
    assert memory["gateway",] > 10 << 20
    assert _values(found["moe_process_cpu_seconds"], "process")["gateway",] > 0


def test_a_process_takes_what_others_say() -> None:
    """Within what changes from one look to the next; nothing is known of one that is gone."""
    own, theirs = usage_of(), psutil.Process()
    times = theirs.cpu_times()
    assert own.cpu_s == pytest.approx(times.user + times.system, abs=0.5)
    assert own.rss_bytes == pytest.approx(theirs.memory_info().rss, rel=0.1)
    assert usage_of(os.getpid()).rss_bytes > 0
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert usage_of(child.pid) == ProcessUsage()


class NvmlError(Exception):
    """As the library raises."""


def _library() -> SimpleNamespace:
    """One that knows two GPUs, the second of which does not answer."""

    def memory(handle: int) -> SimpleNamespace:
        if handle == 101:
            raise NvmlError("it fell off the bus")
        return SimpleNamespace(used=3 << 30, total=141 << 30)

    return SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: 100 + index,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=50),
        nvmlDeviceGetName=lambda handle: "NVIDIA H200",
    )


def test_devices() -> None:
    """What the library says; one that does not answer is left out."""
    assert NvmlDevices(_library()).read() == OneDevice().read()
    found = _samples(Telemetry(), OneDevice())
    of = {("0", "NVIDIA H200"): 0.5}
    assert _values(found["moe_device_utilisation_ratio"], "device", "name") == of


def test_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bindings, without a driver, and by default."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert isinstance(find_devices(), NoDevices)

    def no_driver() -> None:
        raise NvmlError("driver not loaded")

    broken = _library()
    broken.nvmlInit = no_driver
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    assert isinstance(find_devices(), NoDevices)
    monkeypatch.setitem(sys.modules, "pynvml", _library())
    assert find_devices().read() == (DeviceUse(0, "NVIDIA H200", 0.5, 3 << 30, 141 << 30),)
    assert _samples(Telemetry())["moe_device_utilisation_ratio"].samples == []
