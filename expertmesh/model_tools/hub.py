"""Models of the Hugging Face hub, by name: downloaded once, verified, then found without network.

The client of the hub keeps its usual cache (`HF_HOME`), where other programs find the files too.
A file of the cache is named by its checksum; who has verified it leaves a mark beside, so that
gigabytes are read for this once. Safe for several processes on one cache: one downloads, the others
wait for its lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from expertmesh.errors import CheckpointError, StartupError
from expertmesh.file_lock import exclusive
from expertmesh.model_tools.progress import Progress

if TYPE_CHECKING:
    from huggingface_hub import ResolvedRevision

logger = logging.getLogger("expertmesh.hub")

FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
"""What is downloaded of a model's folder: weights, configuration, tokenizer; nothing that runs."""
NOT_FILES = ("*/*", "consolidated*.safetensors")
"""But for other folders, and weights in a second layout."""

_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9_][\w./-]*", re.ASCII)
_SHA256, _GIT_SHA1 = 64, 40
"""Digits of the names of files: git's own are named as git does, large ones by SHA-256."""
_REFUSALS = (401, 403)
_READ_AT_A_TIME = 4
_LONGEST_DOWNLOAD_S = 86_400.0
_MARKS = ".expertmesh-verified"


@dataclass(frozen=True)
class HubModel:
    """A model as users name it."""

    name: str
    """organisation/model."""
    revision: str | None = None
    """Branch, tag or commit; None for the main branch."""

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name


def parse_hub_model(text: str) -> HubModel | None:
    """`organisation/model` or `organisation/model@revision`; None for anything else."""
    name, at, revision = text.partition("@")
    if not _NAME.fullmatch(name) or (at and not _REVISION.fullmatch(revision)):
        return None
    return HubModel(name, revision or None)


def ensure_hub_model(model: HubModel, progress: Progress) -> Path:
    """Folder of a model, downloaded and verified if it was not before.

    Args:
        model: Which one.
        progress: Is told what happens.

    Raises:
        CheckpointError: The hub has no such model or revision, it is closed to this user, or a file
            is damaged.
        StartupError: It is not in the cache and cannot be downloaded: no network, no space.
    """
    try:
        from huggingface_hub import HfApi, constants
    except ModuleNotFoundError as error:
        raise StartupError(
            f"model {model}: the client of the hub is not installed: {error}",
            fix="pip install 'expertmesh[gateway]' or 'expertmesh[worker]', or give a folder",
        ) from error
    cache = Path(constants.HF_HUB_CACHE).expanduser().absolute()
    repository = cache / f"models--{model.name.replace('/', '--')}"
    with _errors_of(model, cache):
        revision = HfApi().resolve_revision(model.name, revision=model.revision)
        with _alone(repository):
            return _ensure(model, revision, repository, progress)


def _ensure(
    model: HubModel, revision: ResolvedRevision, repository: Path, progress: Progress
) -> Path:
    """Downloads what is missing and verifies it; what is damaged is fetched once more."""
    folder = _download(model, revision, repository, progress)
    if not (damaged := _damaged(folder, repository, progress)):
        return folder
    for path in damaged:
        os.unlink(path.resolve())
        path.unlink()
    folder = _download(model, revision, repository, progress)
    if damaged := _damaged(folder, repository, progress):
        raise CheckpointError(
            f"model {model}: {damaged[0].name} was downloaded twice, and does not have the "
            f"checksum {damaged[0].resolve().name} that the hub promised",
            fix="look for what is wrong with the disk, the network or a proxy",
        )
    return folder


def _download(
    model: HubModel, revision: ResolvedRevision, repository: Path, progress: Progress
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars

    if not are_progress_bars_disabled():
        disable_progress_bars()
    missing = _bytes_missing(model, revision)
    if missing:
        _check_space(model, repository, missing)
        logger.info("downloading model %s: %.2f GB", model, missing / 1e9)
        progress.stage(f"downloading {model}", missing)
    folder = snapshot_download(
        model.name,
        revision=revision,
        allow_patterns=list(FILES),
        ignore_patterns=list(NOT_FILES),
    )
    if missing:
        progress.advance(missing)
    return Path(folder)


def _bytes_missing(model: HubModel, revision: ResolvedRevision) -> int:
    """What is to be downloaded; 0 if nothing is, or nothing can be known without network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError

    try:
        files = snapshot_download(
            model.name,
            revision=revision,
            allow_patterns=list(FILES),
            ignore_patterns=list(NOT_FILES),
            dry_run=True,
        )
    except DryRunError:
        return 0
    if not any(file.filename.endswith(".safetensors") for file in files):
        raise CheckpointError(f"model {model}: the hub has no *.safetensors of it")
    return sum(file.file_size or 0 for file in files if file.will_download)


def _check_space(model: HubModel, repository: Path, needed: int) -> None:
    free = shutil.disk_usage(repository).free
    if free < needed:
        raise StartupError(
            f"model {model}: {needed / 1e9:.1f} GB are to be downloaded, {free / 1e9:.1f} GB are "
            f"free in {repository.parent}",
            fix="free some, or name another folder with HF_HOME",
        )


def _damaged(folder: Path, repository: Path, progress: Progress) -> list[Path]:
    """Files of a snapshot that are not what their checksum says; others are marked as verified."""
    marks = repository / _MARKS
    unknown = [path for path in sorted(folder.iterdir()) if _is_of_model(path)]
    unknown = [path for path in unknown if not _is_marked(path, marks)]
    if not unknown:
        return []
    progress.stage("verifying", sum(path.stat().st_size for path in unknown))
    damaged = []
    with ThreadPoolExecutor(_READ_AT_A_TIME, "verify") as pool:
        for path, is_good in zip(unknown, pool.map(_has_its_checksum, unknown), strict=True):
            progress.advance(path.stat().st_size)
            if is_good:
                _mark(path, marks)
            else:
                damaged.append(path)
    return damaged


def _is_of_model(path: Path) -> bool:
    """True for what is downloaded here; where a cache has no links files bear no checksum."""
    return path.is_symlink() and any(fnmatch(path.name, pattern) for pattern in FILES)


def _has_its_checksum(path: Path) -> bool:
    expected, size = path.resolve().name, path.stat().st_size
    with path.open("rb") as file:
        if len(expected) == _SHA256:
            return hashlib.file_digest(file, "sha256").hexdigest() == expected
        if len(expected) != _GIT_SHA1:
            return False
        digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        while part := file.read(1 << 20):
            digest.update(part)
        return digest.hexdigest() == expected


def _is_marked(path: Path, marks: Path) -> bool:
    try:
        return (marks / path.resolve().name).read_text("ascii") == _state_of(path)
    except FileNotFoundError:
        return False


def _mark(path: Path, marks: Path) -> None:
    """Without a mark, as in a cache that cannot be written, it is verified again."""
    with contextlib.suppress(OSError):
        marks.mkdir(exist_ok=True)
        (marks / path.resolve().name).write_text(_state_of(path), "ascii")


def _state_of(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


@contextlib.contextmanager
def _alone(repository: Path) -> Iterator[None]:
    """A context in which no other process of ours downloads this model or verifies it."""
    lock = repository.parent / ".locks" / f"{repository.name}.expertmesh.lock"
    with contextlib.ExitStack() as stack:
        if os.access(repository, os.W_OK) or not repository.exists():
            stack.enter_context(exclusive(lock, _LONGEST_DOWNLOAD_S))
            repository.mkdir(exist_ok=True)
        yield


@contextlib.contextmanager
def _errors_of(model: HubModel, cache: Path) -> Iterator[None]:
    """A context in which errors of the hub's client become ours."""
    from httpx2 import HTTPError
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"model {model}: the hub gives it only to those who have accepted its terms",
            fix="accept them on its page, and give a token with HF_TOKEN",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"model {model}: neither a folder here nor a model that the hub shows to you",
            fix="check its name; for a private one give a token with HF_TOKEN",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"model {model}: the hub has no revision {model.revision!r} of it"
        ) from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"model {model}: {error}") from error
    except (errors.RevisionResolutionError, errors.LocalEntryNotFoundError) as error:
        raise _not_cached(model, cache, error) from error
    except (HTTPError, errors.FileMetadataError) as error:
        if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in _REFUSALS:
            raise CheckpointError(
                f"model {model}: the hub refuses this token, or wants one: {_first_line(error)}",
                fix="give a valid token with HF_TOKEN",
            ) from error
        raise StartupError(
            f"model {model}: it was not downloaded: {_first_line(error)}",
            fix="try again once the hub can be reached; files that are there in full are kept",
        ) from error
    except OSError as error:
        raise StartupError(
            f"model {model}: {error.filename or cache}: {error.strerror or error}",
            fix="HF_HOME names the folder of downloads; it has to be writable, with enough space",
        ) from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # of what it has answered
        raise StartupError(
            f"model {model}: what answers at {constants.ENDPOINT} is no hub: "
            f"{type(error).__name__}: {_first_line(error)}",
            fix="check HF_ENDPOINT, and for a proxy or a portal in between",
        ) from error


def _not_cached(model: HubModel, cache: Path, error: Exception) -> StartupError:
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return StartupError(
            f"model {model}: it is not, or not in full, in {cache}, and HF_HUB_OFFLINE forbids to "
            "download it",
            fix=f"run `expertmesh model download {model}` with network, or set HF_HOME",
        )
    return StartupError(
        f"model {model}: it is not, or not in full, in {cache}, and the hub cannot be reached: "
        f"{_first_line(error.__cause__ or error)}",
        fix="check the network, HF_ENDPOINT and proxies",
    )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
