"""The command `expertmesh`: flags, environment, configuration file, and what they start.

Precedence: flag > environment > file (`--config`) > default. Defaults and help texts come from
`expertmesh.settings`. Whatever is slow to import is imported by the command that needs it, so that
`--help` answers in a fraction of a second.

Exit codes: 0 done or stopped on request, 1 failed, 2 a setting is wrong, 3 the model cannot be
served, 4 an address cannot be bound, 130 interrupted before anything was served.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.config import Env

from expertmesh import __version__
from expertmesh.errors import ExpertMeshError, SettingsError, StartupError
from expertmesh.key_settings import KeyFiles
from expertmesh.scaling_settings import ScalingSettings
from expertmesh.settings import (
    EngineSettings,
    ExpertWorkerOptions,
    ExpertWorkerSettings,
    GatewaySettings,
    HttpSettings,
    LogSettings,
    MeshOptions,
    MeshSettings,
    ModelOptions,
    ModelSettings,
    data_home,
)
from gateway.command.cli_config import apply_config_file, check_texts
from gateway.command.client_cli import chat, complete, top
from gateway.command.experts_commands import experts_app
from gateway.command.model_commands import model_app
from gateway.command.placement_commands import placement_app

INTERRUPTED = 130

_DEFAULTS = GatewaySettings()
_MODEL_OPTIONS = ModelOptions()
_MESH_OPTIONS = MeshOptions()
_WORKER_OPTIONS = ExpertWorkerOptions()

_MODEL = Group.create_ordered("Model")
_ADDRESSES = Group.create_ordered("Addresses")
_EXPERTS = Group.create_ordered("Experts")
_SCALING = Group.create_ordered("Scaling in a cluster")
_ACCESS = Group.create_ordered("Access")
_LIMITS = Group.create_ordered("Limits")
_OUTPUT = Group.create_ordered("Output and configuration")

ModelArgument = Annotated[str, Parameter(group=_MODEL)]
ModelFlags = Annotated[ModelOptions, Parameter(name="*", group=_MODEL)]
HttpFlags = Annotated[HttpSettings, Parameter(name="*", group=_ADDRESSES)]
MeshFlags = Annotated[MeshSettings, Parameter(name="*", group=_EXPERTS)]
ScalingFlags = Annotated[ScalingSettings, Parameter(name="*", group=_SCALING)]
MeshOptionFlags = Annotated[MeshOptions, Parameter(name="*", group=_EXPERTS)]
EngineFlags = Annotated[EngineSettings, Parameter(name="*", group=_LIMITS)]
WorkerFlags = Annotated[ExpertWorkerOptions, Parameter(name="*", group=_EXPERTS)]
LogFlags = Annotated[LogSettings, Parameter(name="*", group=_OUTPUT)]
ConfigFlag = Annotated[Path | None, Parameter(group=_OUTPUT)]
ApiKeyFlags = Annotated[list[str] | None, Parameter(group=_ACCESS, negative="")]
ApiKeyFile = Annotated[Path | None, Parameter(group=_ACCESS)]

app = App(
    name="expertmesh",
    help="Serves Mixture-of-Experts language models, attention and experts in separate processes.",
    config=(Env("EXPERTMESH_", command=False), apply_config_file, check_texts),
    version_flags=("--version",),
    version=__version__,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
    sort_key=0,
)
app.command(model_app)
app.command(placement_app)
app.command(experts_app)
for command, sort_key in ((chat, 5), (complete, 6), (top, 6)):
    app.command(command, sort_key=sort_key)


@app.command(sort_key=1)
def serve(
    model: ModelArgument = ModelSettings.model,
    *,
    options: ModelFlags = _MODEL_OPTIONS,
    http: HttpFlags = _DEFAULTS.http,
    mesh: MeshFlags = _DEFAULTS.mesh,
    engine: EngineFlags = _DEFAULTS.engine,
    log: LogFlags = _DEFAULTS.log,
    api_key: ApiKeyFlags = None,
    api_key_file: ApiKeyFile = None,
    admin_key_file: ApiKeyFile = None,
    ask: Annotated[str | None, Parameter(group=_OUTPUT)] = None,
    config: ConfigFlag = None,
) -> int:
    """Start everything on this machine: gateway, attention worker and expert workers.

    Parameters
    ----------
    model
        Checkpoint folder in Hugging Face layout, ORGANISATION/NAME[@REVISION] of the Hugging Face
        hub, or demo, demo-plain, demo-dense.
    api_key
        Key that callers must show; may be repeated. Others on this machine can read flags: better
        name keys in EXPERTMESH_API_KEYS, separated by commas, or in a file.
    api_key_file
        File with an API key a line; read anew when it changes.
    admin_key_file
        File with a key a line for those who drain expert workers and move experts; also
        EXPERTMESH_ADMIN_KEYS. Without one, only callers on this machine may, and no API key is set.
    ask
        Once ready, stream the answer to this question to the terminal.
    config
        YAML file with the names of these flags as keys.
    """
    from gateway.api_keys import collect_keys
    from gateway.command.launcher import serve_model

    keys = collect_keys(api_key or (), api_key_file, admin_key_file)
    settings = GatewaySettings(
        http,
        _model_settings(model, options),
        engine,
        mesh,
        keys=KeyFiles.of(api_key_file, admin_key_file),
        log=log,
    )
    return serve_model(settings, ask=ask, keys=keys)


@app.command(sort_key=2)
def gateway(
    model: ModelArgument = ModelSettings.model,
    *,
    options: ModelFlags = _MODEL_OPTIONS,
    http: HttpFlags = _DEFAULTS.http,
    mesh: MeshOptionFlags = _MESH_OPTIONS,
    scaling: ScalingFlags = _DEFAULTS.scaling,
    engine: EngineFlags = _DEFAULTS.engine,
    log: LogFlags = _DEFAULTS.log,
    api_key: ApiKeyFlags = None,
    api_key_file: ApiKeyFile = None,
    admin_key_file: ApiKeyFile = None,
    config: ConfigFlag = None,
) -> int:
    """Start a gateway with its attention workers; expert workers run elsewhere.

    Parameters
    ----------
    model
        Checkpoint folder in Hugging Face layout, ORGANISATION/NAME[@REVISION] of the Hugging Face
        hub, or demo, demo-plain, demo-dense.
    api_key
        Key that callers must show; may be repeated. Others on this machine can read flags: better
        name keys in EXPERTMESH_API_KEYS, separated by commas, or in a file.
    api_key_file
        File with an API key a line; read anew when it changes.
    admin_key_file
        File with a key a line for those who drain expert workers and move experts; also
        EXPERTMESH_ADMIN_KEYS. Without one, only callers on this machine may, and no API key is set.
    config
        YAML file with the names of these flags as keys.
    """
    from gateway.__main__ import run
    from gateway.api_keys import collect_keys
    from gateway.command.launcher import check_ports, find_model

    keys = collect_keys(api_key or (), api_key_file, admin_key_file)
    os.environ.update(keys.to_environment())
    settings = GatewaySettings(
        http,
        _model_settings(model, options),
        engine,
        MeshSettings(**vars(mesh)),
        scaling=scaling,
        keys=KeyFiles.of(api_key_file, admin_key_file),
        log=log,
    )
    check_ports(settings.http)
    return run(find_model(settings).settings)


@app.command(name="expert-worker", sort_key=3)
def expert_worker(
    model: ModelArgument = ExpertWorkerSettings.model,
    *,
    options: WorkerFlags = _WORKER_OPTIONS,
    log: LogFlags = _DEFAULTS.log,
    config: ConfigFlag = None,
) -> int:
    """Start one expert worker.

    Parameters
    ----------
    model
        Checkpoint folder in Hugging Face layout, ORGANISATION/NAME[@REVISION] of the Hugging Face
        hub, or demo, demo-plain, demo-dense.
    config
        YAML file with the names of these flags as keys.
    """
    from gateway.command.launcher import exec_expert_worker

    return exec_expert_worker(model, options, log)


@app.command(sort_key=7)
def doctor(
    model: ModelArgument = ModelSettings.model,
    *,
    options: ModelFlags = _MODEL_OPTIONS,
    http: HttpFlags = _DEFAULTS.http,
    mesh: MeshOptionFlags = _MESH_OPTIONS,
    engine: EngineFlags = _DEFAULTS.engine,
    url: str | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="", group=_OUTPUT)] = False,
    config: ConfigFlag = None,
) -> int:
    """Look for what would keep a gateway with these flags from working, and say what to do.

    Exit code 1 if something must be done. Nothing is started, downloaded or changed.

    Parameters
    ----------
    model
        As for `expertmesh gateway`.
    url
        A running server to ask, such as http://127.0.0.1:8000, instead of looking at ports.
    as_json
        Findings for programs.
    config
        YAML file with the names of these flags as keys.
    """
    from gateway.command.doctor_command import examine

    return examine(model, options, http, mesh, engine, url=url, as_json=as_json)


@app.command(sort_key=8)
def version() -> int:
    """Print versions of this program and of what it computes with."""
    import platform
    from importlib import metadata

    names = ("torch", "numba", "grpcio", "aiohttp", "tokenizers")
    lines = [f"expertmesh {__version__}", f"python {platform.python_version()}"]
    installed = {distribution.name for distribution in metadata.distributions()}
    lines += [f"{name} {metadata.version(name)}" for name in names if name in installed]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def main() -> None:
    """Entry point of the console script; ends the process with the documented exit code."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Runs one command line. Errors become one line on standard error and an exit code."""
    from expertmesh.processes import write_error

    try:
        code = app(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        command = " ".join(["expertmesh", *(error.command_chain or ())])
        write_error(SettingsError(str(error), fix=f"see {command} --help"))
        return SettingsError.exit_code
    except StartupError as error:
        write_error(error)
        return error.exit_code
    except ExpertMeshError as error:
        write_error(error)
        return StartupError.exit_code
    except OSError as error:  # a path that cannot be, a full disk
        where = f"{str(error.filename)[:200]}: " if error.filename else ""
        is_ours = str(error.filename).startswith(str(data_home()))
        fix = "have EXPERTMESH_HOME name a folder that can be written" if is_ours else ""
        write_error(StartupError(f"{where}{error.strerror or error}", fix=fix))
        return StartupError.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def _model_settings(model: str, options: ModelOptions) -> ModelSettings:
    return ModelSettings(
        dtype=options.dtype,
        expert_dtype=options.expert_dtype,
        max_model_len=options.max_model_len,
        served_model_name=options.served_model_name,
        model=model,
    )
