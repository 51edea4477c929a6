"""Models by their name on the hub, with its real client and a hub on loopback."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from expertmesh.checkpoint import Checkpoint, name_of_folder
from expertmesh.errors import CheckpointError, StartupError
from expertmesh.model_tools.hub import HubModel, parse_hub_model
from expertmesh.model_tools.make_tiny import make_tiny
from expertmesh.model_tools.progress import NoProgress
from expertmesh.model_tools.resolve import resolve_model
from tests.support.fake_hub import COMMIT, FakeHub

NAME = "some-org/tiny.Moe_1"
WEIGHTS = "model.safetensors"
EXTRA = {
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"a pickle",
    "modeling_tiny.py": b"print('hello')",
    "consolidated.safetensors": b"the same weights once more",
    "original/params.json": b"{}",
    "README.md": b"# Tiny",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A checkpoint that can be opened, and what lies beside such on the hub."""
    folder = tmp_path_factory.mktemp("hub") / "tiny"
    make_tiny("mixtral", folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()} | EXTRA


@pytest.fixture
async def hub(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[FakeHub]:
    """Where the client of this process looks, with a cache of its own."""
    async with FakeHub(NAME, files).serving() as hub:
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.chdir(tmp_path)
        yield hub


async def resolved(name: str = NAME) -> Path:
    """The folder that a process would serve."""
    return await asyncio.to_thread(resolve_model, name, Path("home"), NoProgress())


async def test_download(hub: FakeHub, files: dict[str, bytes]) -> None:
    """Weights, configuration and tokenizer come once, and nothing that could run."""
    folder = await resolved()
    wanted = {name for name in files if name not in EXTRA} | {"chat_template.jinja"}
    assert {path.name for path in folder.iterdir()} == wanted
    assert set(hub.downloads) == wanted
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.name == NAME
    num_requests = hub.num_requests
    assert await resolved() == folder
    assert await resolved(f"{NAME}@v1") == folder
    assert set(hub.downloads.values()) == {1}
    assert hub.num_requests - num_requests == 2  # which commit it is now
    assert await resolved(f"{NAME}@{COMMIT}") == folder
    assert hub.num_requests - num_requests == 2


async def test_a_connection_that_breaks_off(
    hub: FakeHub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is asked for, not the whole."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", len(files[WEIGHTS]) // 4)
    hub.breaks_off = {WEIGHTS}
    folder = await resolved()
    assert (folder / WEIGHTS).read_bytes() == files[WEIGHTS]
    (rest,) = hub.ranges
    assert rest != "bytes=0-"


async def test_what_is_there_in_full_is_kept(hub: FakeHub, tmp_path: Path) -> None:
    """After a download that failed."""
    folder = await resolved()
    path = folder / WEIGHTS
    os.unlink(path.resolve())
    path.unlink()
    assert await resolved() == folder
    assert hub.downloads.pop(WEIGHTS) == 2
    assert set(hub.downloads.values()) == {1}


async def test_without_network(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was downloaded is found, asked for or not; what was not is told, with a way out."""
    folder = await resolved()
    num_requests = hub.num_requests
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert await resolved() == folder
    with pytest.raises(StartupError, match="HF_HUB_OFFLINE forbids") as caught:
        await resolved("other-org/other")
    assert "expertmesh model download other-org/other" in caught.value.fix
    (folder / "config.json").unlink()
    with pytest.raises(StartupError, match="not in full"):
        await resolved()
    assert hub.num_requests == num_requests


async def test_a_hub_that_is_gone(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cached is served on; without it the error names the network."""
    folder = await resolved()
    for endpoint in ("http://127.0.0.1:9", hub.url):
        hub.status = 503
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        assert await resolved() == folder
        with pytest.raises(StartupError, match="the hub cannot be reached") as caught:
            await resolved("other-org/other")
        assert "HF_ENDPOINT" in caught.value.fix


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
async def test_a_damaged_file_is_fetched_once_more(
    hub: FakeHub, files: dict[str, bytes], name: str
) -> None:
    """By SHA-256 where the hub has that, else as git hashes; then it is an error."""
    hub.corrupts[name] = 1
    folder = await resolved()
    assert (folder / name).read_bytes() == files[name]
    assert hub.downloads[name] == 2
    shutil.rmtree(folder.parent.parent)
    hub.corrupts[name] = 2
    with pytest.raises(CheckpointError, match=f"{name} was downloaded twice"):
        await resolved()


async def test_a_file_that_is_damaged_later(hub: FakeHub, files: dict[str, bytes]) -> None:
    """Whoever writes to a file of the cache has it verified again; else it is read once."""
    folder = await resolved()
    blob = (folder / WEIGHTS).resolve()
    status = blob.stat()
    blob.write_bytes(bytes(len(files[WEIGHTS])))
    os.utime(blob, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert await resolved() == folder
    assert (folder / WEIGHTS).read_bytes() == files[WEIGHTS]


@pytest.mark.parametrize(
    ("status", "name", "named"),
    [
        (401, NAME, "refuses this token, or wants one"),
        (403, NAME, "accepted its terms"),
        (0, "some-org/nothing", "neither a folder here nor a model"),
        (0, f"{NAME}@v2", "no revision 'v2'"),
        (0, "a--b/c", "a--b/c"),
    ],
)
async def test_refusals(hub: FakeHub, status: int, name: str, named: str) -> None:
    """They say whose fault it is."""
    hub.status = status
    with pytest.raises(CheckpointError, match=named) as caught:
        await resolved(name)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("says", [b"<html>Please log in</html>", b'{"items": 5}', b"[1, 2]", b"5"])
async def test_what_is_no_hub(hub: FakeHub, says: bytes) -> None:
    """A portal or a proxy that answers everything is named, as one that may be gone tomorrow."""
    hub.says = says
    with pytest.raises(StartupError, match=hub.url) as caught:
        await resolved()
    assert "HF_ENDPOINT" in caught.value.fix


async def test_models_without_safetensors(hub: FakeHub) -> None:
    """Pickles are never downloaded."""
    del hub.files[WEIGHTS]
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        await resolved()
    assert not hub.downloads


async def test_a_full_disk(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is found before anything is downloaded."""
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(StartupError, match="are free in") as caught:
        await resolved()
    assert "HF_HOME" in caught.value.fix
    assert not hub.downloads


async def test_several_processes_download_at_once(hub: FakeHub, tmp_path: Path) -> None:
    """As init containers on one volume do: each file comes once, all find the same folder."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
    }
    command = (sys.executable, "-m", "gateway", "model", "download", NAME)
    root = Path(__file__).parents[3]

    async def run() -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, cwd=root, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        return process.returncode, out.decode()

    ends = await asyncio.gather(run(), run())
    folder = tmp_path / "home" / "hub" / "models--some-org--tiny.Moe_1" / "snapshots" / COMMIT
    assert ends == [(0, f"{folder}\n")] * 2
    assert set(hub.downloads.values()) == {1}


def test_names() -> None:
    """Of organisation and model, and perhaps a revision; what is none is a folder or nothing."""
    assert parse_hub_model("org/name") == HubModel("org/name")
    assert parse_hub_model("org/name@refs/pr/1") == HubModel("org/name", "refs/pr/1")
    assert str(HubModel("org/name", "v1")) == "org/name@v1"
    for text in (
        "name",
        "/org/name",
        "./name",
        "../name",
        "org/name/x",
        "org/name@",
        "org/",
        "~/x",
    ):
        assert parse_hub_model(text) is None
    assert name_of_folder(Path("/c/models--org--na-me/snapshots/abc")) == "org/na-me"
    assert name_of_folder(Path("/models/mixtral")) == "mixtral"


async def test_a_folder_comes_first(hub: FakeHub, tmp_path: Path) -> None:
    """Nobody is asked for what is here."""
    (tmp_path / NAME).mkdir(parents=True)
    assert await resolved() == Path(NAME)
    assert hub.num_requests == 0
