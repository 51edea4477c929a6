"""What `expertmesh doctor` says of a machine, a folder and a model, and how it says it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from expertmesh import PROTOCOL_REVISION
from gateway.doctor import machine, network
from gateway.doctor.finding import Finding, Health, broken, fine, warning
from gateway.doctor.machine import check_machine
from gateway.doctor.model import check_model
from gateway.doctor.report import as_json, as_text, exit_code
from gateway.doctor.storage import check_storage
from tests.support.tiny_checkpoints import MIXTRAL, save_tiny

GIB = 2**30


def by_health(findings: list[Finding], health: Health) -> list[str]:
    """Messages of the findings that are so."""
    return [finding.message for finding in findings if finding.health is health]


def test_this_machine_is_fine() -> None:
    """The tests run on it; nothing may be broken."""
    findings = list(check_machine())
    assert not by_health(findings, Health.BROKEN)
    subjects = {finding.subject for finding in findings}
    assert {"python", "package", "cores", "memory", "descriptors"} <= subjects


def test_a_gpu_that_torch_cannot_use_is_named(tmp_path: Path) -> None:
    """Only where there is a driver; a build of torch for CPUs is the reason."""
    device = tmp_path / "nvidiactl"
    assert not any(finding.subject == "gpu" for finding in check_machine(device))
    device.touch()
    (found,) = [finding for finding in check_machine(device) if finding.subject == "gpu"]
    assert (found.health is Health.WARNING) == ("+cpu" in found.message)


@pytest.mark.parametrize(
    ("finding", "health"),
    [
        (machine._python((3, 10)), Health.BROKEN),
        (machine._python(sys.version_info[:2]), Health.FINE),
        (machine._memory(GIB), Health.WARNING),
        (machine._memory(8 * GIB), Health.FINE),
        (machine._descriptors(1024), Health.WARNING),
        (machine._descriptors(65_536), Health.FINE),
        (next(machine._packages(("no-such-package",))), Health.BROKEN),
        (network._revision("u", {"protocol_revision": PROTOCOL_REVISION}), Health.FINE),
        (network._revision("u", {"protocol_revision": 0}), Health.WARNING),
    ],
)
def test_limits(finding: Finding, health: Health) -> None:
    """What is not fine comes with what to do."""
    assert finding.health is health
    assert bool(finding.fix) == (health is not Health.FINE)


def test_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not there yet is looked at by its parent, and not made."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    home = tmp_path / "not" / "there"
    folder, kernels = check_storage(home)
    assert folder.health is Health.FINE
    assert kernels.health is Health.WARNING
    assert not home.parent.exists()
    (home / "numba").mkdir(parents=True)
    (home / "numba" / "a.nbc").touch()
    assert [finding.health for finding in check_storage(home)] == [Health.FINE] * 2


def test_a_data_folder_that_cannot_be_written_and_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are named with the folder. /proc takes no files of anybody."""
    (found,) = check_storage(Path("/proc/self/nothing"))
    assert found.health is Health.BROKEN
    assert "/proc/self/nothing" in found.message
    usage = shutil.disk_usage(tmp_path)._replace(free=GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    assert next(check_storage(tmp_path)).health is Health.WARNING


def test_models(tmp_path: Path) -> None:
    """One that can be served, one that is damaged, one that is not there, one not made yet."""
    model = save_tiny(tmp_path / "model", MIXTRAL)
    checkpoint, findings = check_model(str(model), tmp_path)
    assert checkpoint is not None
    assert [finding.health for finding in findings] == [Health.FINE] * 2
    for wrong, mentions in ((str(tmp_path / "none"), "none"), ("no model", "no model")):
        checkpoint, (found,) = check_model(wrong, tmp_path)
        assert checkpoint is None
        assert found.health is Health.BROKEN
        assert mentions in found.message
    next(model.glob("*.safetensors")).write_bytes(b"nothing")
    assert check_model(str(model), tmp_path)[1][0].health is Health.BROKEN
    assert check_model("demo", tmp_path / "empty")[1][0].health is Health.WARNING


def test_reports() -> None:
    """People see a line and a fix; programs JSON; the exit code says whether anything is broken."""
    findings = [fine("a", "is so"), warning("b", "may be", "wait"), broken("c", "is not", "do it")]
    assert as_text(findings).splitlines() == [
        "ok  a: is so",
        "??  b: may be",
        "      fix: wait",
        "!!  c: is not",
        "      fix: do it",
    ]
    told = json.loads(as_json(findings))
    assert not told["healthy"]
    assert told["findings"][2] == {
        "subject": "c",
        "health": "broken",
        "message": "is not",
        "fix": "do it",
    }
    assert exit_code(findings) == 1
    assert exit_code(findings[:2]) == 0
