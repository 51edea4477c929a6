"""Each process needs only its own extras: the others' packages may be absent.

A `sitecustomize` makes packages unimportable in the processes that must do without them.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.api import Api
from tests.support.mesh import COMMAND, watch_once
from tests.support.oracle import prompts
from tests.support.processes import Managed, run

GATEWAY_ONLY = (
    "aiohttp", "cyclopts", "gguf", "google.rpc", "grpc_reflection", "grpc_status", "jinja2",
    "msgspec", "orjson", "rich", "tokenizers", "uvloop", "yaml",
)  # fmt: skip
WORKER_ONLY = ("torch", "numba", "llvmlite")
NOBODYS = ("transformers", "kubernetes", "triton", "openai", "psutil", "pytest", "hypothesis")

_BLOCKER = '''
"""Refuses to import packages that a process of this kind must not need."""
import json
import os
import sys

_ALL = json.loads(os.environ["EXPERTMESH_TEST_BLOCKED"])
_BLOCKED = next((_ALL[name] for name in sys.orig_argv if name in _ALL), [])


class _Refuse:
    @staticmethod
    def find_spec(name, path=None, target=None):
        for blocked in _BLOCKED:
            if name == blocked or name.startswith(blocked + "."):
                raise ModuleNotFoundError(f"{name} is blocked in this test", name=name)
        return None


sys.meta_path.insert(0, _Refuse)
'''


@pytest.fixture
def blocked(tmp_path: Path) -> dict[str, str]:
    """Environment in which each kind of process lacks the extras of the others."""
    (tmp_path / "sitecustomize.py").write_text(_BLOCKER)
    lacking = {
        "expert_worker": [*GATEWAY_ONLY, *NOBODYS],
        "attention_worker": [*GATEWAY_ONLY, *NOBODYS],
        "gateway": [*WORKER_ONLY, *NOBODYS],
        "blocked-canary": ["json.tool"],
    }
    return {"PYTHONPATH": str(tmp_path), "EXPERTMESH_TEST_BLOCKED": json.dumps(lacking)}


def test_the_blocker_blocks(blocked: dict[str, str]) -> None:
    """The means of this test works: a blocked module cannot be imported."""
    result = run(["-c", "import json.tool", "blocked-canary"], env=blocked)
    assert result.returncode == 1
    assert "is blocked in this test" in result.stderr


def test_each_without_the_extras_of_the_others(text_model: Path, blocked: dict[str, str]) -> None:
    """A gateway without torch, and an attention worker and an expert worker without the gateway's
    packages, serve together."""
    with ExitStack() as stack:
        arguments = ["-m", "expert_worker", str(text_model), "--port", "0", "--dtype", "float32"]
        worker = stack.enter_context(Managed(arguments, name="expert worker", env=blocked))
        address = f"127.0.0.1:{worker.ready()['port']}"
        assert watch_once(address).capacity.used_expert_slots == 24
        flags = ["--experts", address, "--port", "0", "--grpc-port", "0"]
        arguments = ["-m", "gateway", "gateway", str(text_model), "--dtype", "float32", *flags]
        process = stack.enter_context(Managed(arguments, name="gateway", env=blocked))
        info = process.ready()
        assert isinstance(info["http_port"], int)
        api = Api(info["http_port"])
        assert len(api.complete(prompts(320, [9])[0], 8).token_ids) == 8
        assert len(api.complete("text", 8).token_ids) == 8
        for each in (process, worker):
            assert each.stop() == 0, each.stderr


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        (
            "gateway.command.cli",
            ("torch", "numba", "aiohttp", "grpc", "tokenizers", "numpy", "gguf"),
        ),
        ("gateway.server", (*WORKER_ONLY, *NOBODYS)),
        ("expert_worker.__main__", (*GATEWAY_ONLY, *NOBODYS)),
        ("attention_worker.__main__", (*GATEWAY_ONLY, *NOBODYS)),
    ],
)
def test_imports(module: str, absent: tuple[str, ...]) -> None:
    """Importing an entry point brings none of these along."""
    code = f"import {module}, sys, json; print(json.dumps(sorted(sys.modules)))"
    result = run(["-c", code], timeout_s=60)
    assert result.returncode == 0, result.stderr
    imported = set(json.loads(result.stdout))
    assert sorted(imported.intersection(absent)) == []


def test_command_is_one_program() -> None:
    """The console script and `python -m gateway` are the same program."""
    first = run([*COMMAND, "version"], timeout_s=60)
    second = run(["-m", "gateway", "version"], timeout_s=60)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
