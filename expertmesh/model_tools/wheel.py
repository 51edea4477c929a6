"""Fetches the wheel that carries the demo model, through the user's own pip configuration."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from expertmesh.errors import StartupError
from expertmesh.file_lock import exclusive, sync_folder
from expertmesh.model_tools.progress import Progress

DOWNLOAD_TIMEOUT_S = 1500.0


@dataclass(frozen=True)
class PinnedWheel:
    """One file of a package index."""

    requirement: str
    filename: str
    sha256: str


def fetch_wheel(wheel: PinnedWheel, folder: Path, progress: Progress) -> Path:
    """The wheel in `folder`, downloaded if it is not there yet, always verified.

    Raises:
        StartupError: pip failed, or the file is not the one expected.
    """
    path = folder / wheel.filename
    with exclusive(folder / f".{wheel.filename}.lock"):
        if path.is_file() and sha256_of(path) == wheel.sha256:
            return path
        progress.stage(f"downloading {wheel.requirement}", 0)
        with tempfile.TemporaryDirectory(dir=folder, prefix="download-") as scratch:
            pip_download(wheel.requirement, Path(scratch))
            _take(wheel, Path(scratch) / wheel.filename, path)
        progress.advance(path.stat().st_size)
    return path


def pip_download(requirement: str, folder: Path, python: str = sys.executable) -> None:
    """Runs `pip download` for one wheel."""
    command = [python, "-m", "pip", "download", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), requirement]
    try:
        subprocess.run(
            command,
            check=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    except subprocess.TimeoutExpired as error:
        raise _failed(requirement, f"no end after {DOWNLOAD_TIMEOUT_S:.0f} s") from error
    except subprocess.CalledProcessError as error:
        raise _failed(requirement, _last_line(error.stderr)) from error


def extract_member(wheel: Path, member: str, target: Path) -> None:
    """Copies one file out of a wheel."""
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(member) as source,
        target.open("wb") as file,
    ):
        shutil.copyfileobj(source, file, 1 << 20)


def sha256_of(path: Path) -> str:
    """Checksum of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _take(wheel: PinnedWheel, downloaded: Path, path: Path) -> None:
    if not downloaded.is_file():
        raise _failed(wheel.requirement, f"pip did not leave {wheel.filename}")
    found = sha256_of(downloaded)
    if found != wheel.sha256:
        raise StartupError(
            f"{wheel.filename}: expected sha256 {wheel.sha256}, found {found}",
            fix="the package index gave another file: check pip's index settings",
        )
    with downloaded.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(downloaded, path)
    sync_folder(path.parent)


def _failed(requirement: str, why: str) -> StartupError:
    return StartupError(
        f"the demo model could not be downloaded: pip download {requirement}: {why}",
        fix="check the network and pip's index settings, or serve a model folder of your own",
    )


def _last_line(text: str) -> str:
    lines: Sequence[str] = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
