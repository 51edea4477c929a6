"""Keys in a file that changes while they are accepted."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from expertmesh.errors import AuthenticationError, SettingsError
from gateway.api_keys import DIGESTS_VARIABLE, ApiKeys
from gateway.key_file import LOOK_EVERY_S, MAX_KEYS, KeyFile, digest_of

OLD, NEW, FIXED = "sk-old-0123456789", "sk-new-0123456789", "sk-fixed-01234567"


class Clock:
    """Stands until it is told to go on."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def go_on(self) -> None:
        """Until the file is looked at again."""
        self.now_s += LOOK_EVERY_S


@pytest.fixture
def clock() -> Clock:
    """Of the file."""
    return Clock()


def accepts(keys: ApiKeys, key: str) -> bool:
    """Whether a caller with a key is served."""
    try:
        keys.check(key)
    except AuthenticationError:
        return False
    return True


def test_a_changed_file_is_read_anew(tmp_path: Path, clock: Clock) -> None:
    """What is new in it is accepted and what is gone refused; other keys stay."""
    path = tmp_path / "keys"
    path.write_text(f"# of the team\n{OLD}\n")
    keys = ApiKeys([digest_of(FIXED)], KeyFile(path, clock))
    assert [accepts(keys, key) for key in (OLD, NEW, FIXED)] == [True, False, True]
    path.write_text(f"{NEW}\n{NEW}\n")
    clock.go_on()
    assert [accepts(keys, key) for key in (OLD, NEW, FIXED)] == [False, True, True]


def test_a_file_is_looked_at_once_a_second(tmp_path: Path, clock: Clock) -> None:
    """Between two looks a request costs no system call."""
    path = tmp_path / "keys"
    path.write_text(f"{OLD}\n")
    keys = ApiKeys(listed=KeyFile(path, clock))
    path.write_text(f"{NEW}\n{OLD}\n")
    clock.now_s += LOOK_EVERY_S - 0.01
    assert not accepts(keys, NEW)
    clock.now_s += 0.02
    assert accepts(keys, NEW)


def test_a_link_that_leads_elsewhere(tmp_path: Path, clock: Clock) -> None:
    """A kubelet changes a Secret so; also where both files are of one length and one age."""
    for name, key in (("before", OLD), ("after", NEW)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys").write_text(f"{key}\n")
        os.utime(tmp_path / name / "keys", ns=(10**18, 10**18))
    data = tmp_path / "data"
    data.symlink_to("before")
    keys = ApiKeys(listed=KeyFile(data / "keys", clock))
    assert accepts(keys, OLD)
    (tmp_path / "next").symlink_to("after")
    os.replace(tmp_path / "next", data)
    clock.go_on()
    assert [accepts(keys, key) for key in (OLD, NEW)] == [False, True]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "No such file"),
        (b"", "has no API key"),
        (b"# nobody\n", "has no API key"),
        (b"\xff\xfe\n", "not ASCII"),
        (f"{NEW}\nsecret\n".encode(), "cannot be used"),
        ("\n".join(f"sk-{n:010d}" for n in range(MAX_KEYS + 1)).encode(), "has 10001 API keys"),
    ],
)
def test_a_file_that_cannot_be_used(
    tmp_path: Path,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    content: bytes | None,
    named: str,
) -> None:
    """Lets nobody in and shuts nobody out; is named once, without a key, and refused at a start."""
    path = tmp_path / "keys"
    path.write_text(f"{OLD}\n")
    keys = ApiKeys(listed=KeyFile(path, clock))
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            clock.go_on()
            assert [accepts(keys, key) for key in (OLD, NEW, "", "secret")] == [True] + [False] * 3
    (warning,) = caplog.messages
    assert named in warning
    assert str(path) in warning
    assert "secret" not in warning
    with pytest.raises(SettingsError, match=named):
        KeyFile(path)
    path.write_text(f"{NEW}\n")
    clock.go_on()
    assert [accepts(keys, key) for key in (OLD, NEW)] == [False, True]


def test_a_gateway_reads_files_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment has other keys only; without any, a file is enough to need one."""
    path = tmp_path / "keys"
    path.write_text(f"{OLD}\n")
    monkeypatch.setenv(DIGESTS_VARIABLE, digest_of(FIXED).hex())
    both = ApiKeys.from_environment(file=str(path))
    assert [accepts(both, key) for key in (OLD, NEW, FIXED)] == [True, False, True]
    listed = ApiKeys.from_environment(file=str(path))
    assert listed.required
    assert [accepts(listed, key) for key in (OLD, FIXED)] == [True, False]
