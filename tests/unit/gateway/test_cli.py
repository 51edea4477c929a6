"""The command line: precedence of its four sources, errors in one line, quick help."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

import gateway.command.launcher
from expertmesh import __version__
from expertmesh.errors import StartupError
from expertmesh.expert_source import AddressList
from expertmesh.key_settings import KeyFiles
from expertmesh.processes import child_environment
from expertmesh.settings import GatewaySettings
from gateway.api_keys import GivenKeys
from gateway.command.cli import run_command

SOME_IMPORTS = "import argparse, asyncio, dataclasses, http.client, json"
MAX_HELP_TIMES = 7
"""Help takes 3 times as long; torch alone would take 20 times."""
BOMB = "bcdefghijklmnop"
"""Anchors of lists that hold the one before nine times."""


class Served(list[GatewaySettings]):
    """Settings that `serve` was called with; nothing is started."""

    ask: str | None = None
    keys = GivenKeys()

    @property
    def only(self) -> GatewaySettings:
        """The settings of the one call."""
        (settings,) = self
        return settings


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """Replaces what `expertmesh serve` starts by a recorder."""
    calls = Served()

    def record(settings: GatewaySettings, *, ask: str | None, keys: GivenKeys) -> int:
        calls.append(settings)
        calls.ask = ask
        calls.keys = keys
        return 0

    monkeypatch.setattr(gateway.command.launcher, "serve_model", record)
    return calls


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration file with some keys."""
    path = tmp_path / "mesh.yaml"
    path.write_text(
        "model: /from/file\nport: 1111\nmax-model-len: 111\nmax_num_seqs: 11\n"
        "experts: [a:1, b:2]\nserved-model-name: null\n"
    )
    return path


def test_defaults_are_those_of_the_settings(served: Served) -> None:
    """Without flags, environment and file, `serve` gets `GatewaySettings()`."""
    assert run_command(["serve"]) == 0

    assert GatewaySettings() == served.only
    assert served.ask is None


def test_a_gateway_alone_takes_attention_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `serve` does; nothing is started."""
    started: list[GatewaySettings] = []
    monkeypatch.setattr(gateway.command.launcher, "check_ports", lambda http: None)
    monkeypatch.setattr(
        gateway.command.launcher, "find_model", lambda given: SimpleNamespace(settings=given)
    )
    monkeypatch.setattr("gateway.__main__.run", lambda found: started.append(found) or 0)
    assert run_command(["gateway", "--experts", "a:1", "--attention-workers", "3"]) == 0
    (settings,) = started
    assert (settings.mesh.experts, settings.mesh.attention_workers) == ("a:1", 3)


def test_file_overrides_defaults(served: Served, config: Path) -> None:
    """Keys of the file are the names of the flags, with dashes or underscores."""
    assert run_command(["serve", "--config", str(config)]) == 0

    settings = served.only
    assert settings.model.model == "/from/file"
    assert settings.http.port == 1111
    assert settings.model.max_model_len == 111
    assert settings.engine.max_num_seqs == 11
    assert settings.mesh.expert_source == AddressList(("a:1", "b:2"))
    assert settings.model.served_model_name is None
    assert settings.http.grpc_port == 50_051


def test_environment_overrides_file(
    served: Served, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EXPERTMESH_<FLAG> wins over the file, whose other keys still count."""
    monkeypatch.setenv("EXPERTMESH_PORT", "2222")
    monkeypatch.setenv("EXPERTMESH_MODEL", "/from/env")
    monkeypatch.setenv("EXPERTMESH_CONFIG", str(config))

    assert run_command(["serve"]) == 0

    assert served.only.http.port == 2222
    assert served.only.model.model == "/from/env"
    assert served.only.model.max_model_len == 111


def test_flags_override_everything(
    served: Served, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag wins over environment and file."""
    monkeypatch.setenv("EXPERTMESH_PORT", "2222")
    monkeypatch.setenv("EXPERTMESH_MAX_NUM_SEQS", "22")

    assert run_command(["serve", "/flag", "--port", "3333", "--config", str(config)]) == 0

    assert served.only.http.port == 3333
    assert served.only.model.model == "/flag"
    assert served.only.engine.max_num_seqs == 22


def test_binding_flags(served: Served) -> None:
    """The flags that users and scripts rely on."""
    line = (
        "serve /m --host ::1 --port 0 --grpc-port 0 --expert-workers 3 --attention-workers 1"
        " --dtype float32 --max-model-len 64 --served-model-name n --log-level debug --ask hi"
    )
    assert run_command(line.split()) == 0

    settings = served.only
    assert (settings.http.host, settings.http.port, settings.http.grpc_port) == ("::1", 0, 0)
    assert settings.mesh.expert_workers == 3
    assert (settings.model.dtype, settings.model.max_model_len) == ("float32", 64)
    assert settings.model.served_model_name == "n"
    assert settings.log.log_level == "debug"
    assert served.ask == "hi"


def test_api_keys(served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Flags, both variables, a file and the configuration name keys; none gets into settings."""
    assert run_command(["serve"]) == 0
    assert served.keys.api == ()
    file = tmp_path / "keys"
    file.write_text("key-of-file\n")
    line = ["serve", "--api-key", "key-of-flag-1", "--api-key", "key-of-flag-2"]
    monkeypatch.setenv("EXPERTMESH_API_KEYS", "key-of-list-1,key-of-list-2")
    assert run_command([*line, "--api-key-file", str(file)]) == 0
    flags = ("key-of-flag-1", "key-of-flag-2")
    assert served.keys.api == (*flags, "key-of-list-1", "key-of-list-2", "key-of-file")
    assert "key-of" not in served[-1].to_json()
    assert served[-1].keys == KeyFiles(api=str(file))
    monkeypatch.setenv("EXPERTMESH_API_KEY", "key-of-client")
    assert run_command(["serve"]) == 0
    assert served.keys.api == ("key-of-client",)
    config = tmp_path / "mesh.yaml"
    config.write_text("api-key: [key-of-yaml-1, key-of-yaml-2]\nrequire-model: true\n")
    assert run_command(["serve", "--config", str(config)]) == 0
    assert served.keys.api == ("key-of-yaml-1", "key-of-yaml-2")
    assert served[-1].http.require_model


@pytest.mark.parametrize("text", ["", "  ", " , ,"])
def test_no_key_where_one_was_to_be(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """A variable that was empty, or an empty Secret, must not let everybody in."""
    assert run_command(["serve", "--api-key", text]) == 2
    assert "--api-key has no key" in capsys.readouterr().err
    for variable in ("EXPERTMESH_API_KEYS", "EXPERTMESH_ADMIN_KEYS"):
        monkeypatch.setenv(variable, text)
        assert run_command(["serve"]) == 2
        assert f"{variable} has no key" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["secret\udcff", "secret!", "sec ret secret"])
def test_a_wrong_key_is_not_shown(
    served: Served, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    """The message names the flag and not the value."""
    assert run_command(["serve", "--api-key", key]) == 2
    shown = capsys.readouterr().err
    assert "--api-key" in shown
    assert "cret" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            (["serve", "--port", value], f"--port is {value!r}, expected a whole number")
            for value in ("x", "", "8000.7", "1e3", "0x10", "\u0663", "8_0", "nan")
        ),
        *(
            (["serve", *given], "\\udcff', expected text in UTF-8")
            for given in (["m\udcff"], ["--served-model-name", "\udcff"], ["--experts", "\udcff"])
        ),
        *(
            (["serve", f"--host={host}"], f"host is {host!r}, expected a name or an address")
            for host in ("", " ", "[::1]")
        ),
        (["serve", "--port", "70000"], "port is 70000, expected a whole number from 0 to 65535"),
        (["serve", "--prot", "1"], "Unknown option: --prot. Did you mean --port?"),
        (["serve", "--dtype", "int8"], "dtype"),
        (["serve", "--attention-workers", "0"], "attention_workers is 0, expected"),
        (["gateway", "--attention-workers", "0"], "attention_workers is 0, expected"),
        (["serve", "--experts", "a"], "experts has 'a', expected host:port"),
        (["sevre"], 'Unknown command "sevre"'),
        (["model", "upcycle"], "requires an argument"),
    ],
)
def test_wrong_settings(
    served: Served, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """A wrong flag or value: one line with name and value, exit code 2, nothing is started."""
    assert run_command(arguments) == 2

    written = capsys.readouterr()
    assert message in written.err.splitlines()[0]
    assert written.err.startswith("error: ")
    assert written.out == ""
    assert served == []


def test_wrong_environment(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong value in the environment names the variable."""
    monkeypatch.setenv("EXPERTMESH_PORT", "many")

    assert run_command(["serve"]) == 2

    assert "EXPERTMESH_PORT" in capsys.readouterr().err
    assert served == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "unknown key 'prot' in {path}"),
        ("config: x", "unknown key 'config' in {path}"),
        ("port: many", "'port' in {path}"),
        ("port: {a: 1}", "'port' in {path} is {{'a': 1}}, expected one value or a list"),
        ("port: 1.5", "'port' in {path} is '1.5', expected a whole number"),
        ("experts: &a [*a]", "'experts' in {path} is [["),
        (
            "experts:\n- &b ['a:1']\n"
            + "".join(f"- &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise(BOMB)),
            "'experts' in {path} is [[",
        ),
        ("[" * 3000, "configuration file {path} is not YAML"),
        (f"experts: {'[' * 500}{']' * 500}", "configuration file {path} is not YAML"),
        ("--- 1\n--- 2", "configuration file {path} is not YAML"),
        ("a: 9999-99-99", "configuration file {path} is not YAML"),
        ("- 1", "configuration file {path} must hold keys and values"),
        ("{", "configuration file {path} is not YAML"),
        ("a: !!python/object:os.system {}", "configuration file {path} is not YAML"),
    ],
)
def test_wrong_file(
    served: Served, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    """Whatever is wrong with a file, the line names the file and the key."""
    path = tmp_path / "c.yaml"
    path.write_text(text)

    assert run_command(["serve", "--config", str(path)]) == 2

    assert message.format(path=path) in capsys.readouterr().err
    assert served == []


def test_longer_variable_is_not_a_shorter_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    """EXPERTMESH_EXPERTS_HOLD_S does not leak into --experts, nor an unknown one into any flag."""
    monkeypatch.setenv("EXPERTMESH_EXPERTS_HOLD_S", "3")
    monkeypatch.setenv("EXPERTMESH_PORT_OF_CALL", "x")
    monkeypatch.setenv("EXPERTMESH_HOME", str(tmp_path))

    assert run_command(["serve"]) == 0

    assert served.only.mesh.experts == ""
    assert served.only.engine.experts_hold_s == 3.0


def test_start_up_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot start is told with its fix, without a traceback, and with its exit code."""

    def fail(*_: object, **__: object) -> int:
        raise StartupError("no room", fix="make room")

    monkeypatch.setattr(gateway.command.launcher, "serve_model", fail)

    assert run_command(["serve"]) == 1
    assert capsys.readouterr().err == "error: no room\nfix: make room\n"


@pytest.mark.parametrize(
    "line",
    [
        *(["chat", "hi", "--url", url] for url in ("http://[::1", "http://a:99999", "http://a b/")),
        *(["complete", "hi", "--url", url] for url in ("", "ftp://a", "http://", "http://a:x")),
        ["serve", "a" * 5000, "--port", "0", "--grpc-port", "0"],
        ["expert-worker", "a" * 5000],
        ["model", "inspect", "a" * 5000],
    ],
    ids=lambda line: " ".join(line)[:30],
)
def test_odd_addresses_and_paths(capsys: pytest.CaptureFixture[str], line: list[str]) -> None:
    """What no name or path can be is one line, not a traceback."""
    assert run_command(line) in (1, 3)
    assert capsys.readouterr().err.startswith("error: ")


def test_interrupt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before anything is served: one word, exit code 130."""

    def interrupt(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(gateway.command.launcher, "serve_model", interrupt)

    assert run_command(["serve"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    "command",
    ["serve", "gateway", "expert-worker", "model", "chat", "complete", "version"],
)
def test_commands(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """Every command explains itself."""
    assert run_command([command, "--help"]) == 0

    assert f"expertmesh {command}" in capsys.readouterr().out


def test_help_is_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    """Help shows panels, defaults and the variable of each flag."""
    assert run_command(["serve", "--help"]) == 0

    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for part in (" Model ", " Addresses ", " Experts ", " Limits ", "[default: 8000]"):
        assert part in text
    assert "EXPERTMESH_MAX_NUM_BATCHED_TOKENS" in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The version is the first line, and what it computes with follows."""
    assert run_command(["version"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"expertmesh {__version__}"
    assert any(line.startswith("torch ") for line in lines)


def _run(code: str) -> tuple[float, str]:
    """CPU seconds of a Python process that runs `code`, and what it writes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    return user + system, done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"]])
def test_help_is_quick(arguments: list[str]) -> None:
    """Help takes no more than a few times what it takes to import some of the standard library.

    CPU time is measured, and compared with that of something alike, since both the clock and the
    time of a core depend on what else the machine does.
    """
    code = f"from gateway.command.cli import run_command; run_command({arguments!r})"
    runs = [(_run(code), _run(SOME_IMPORTS)) for _ in range(3)]

    assert all("Usage: expertmesh" in text for (_, text), _ in runs)
    help_s, imports_s = (min(run[index][0] for run in runs) for index in (0, 1))
    assert help_s < MAX_HELP_TIMES * imports_s


def test_help_imports_nothing_slow() -> None:
    """Neither torch nor grpc nor anything else that is slow is imported for help."""
    code = (
        "import sys, json; from gateway.command.cli import run_command;"
        "run_command(['serve', '--help']);"
        "print(); print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    imported = set(json.loads(_run(code)[1].splitlines()[-1]))

    assert not imported & {"torch", "numba", "numpy", "grpc", "aiohttp", "tokenizers", "yaml"}
