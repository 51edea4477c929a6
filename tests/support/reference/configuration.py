"""docs/configuration.md, made from the command line: flags, their variables, defaults and help."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass

from cyclopts.argument import Argument

from expertmesh.errors import StartupError
from gateway.command.cli import INTERRUPTED, app
from tests.support.reference.markdown import page, table

COMMANDS = ("serve", "gateway", "expert-worker")
PREFIX = "EXPERTMESH_"

INTRODUCTION = """\
Every flag is also an environment variable and a key of a YAML file that `--config` names. A flag
wins over the environment, the environment over the file, the file over the default. A flag that
is on or off also has a form with `--no-`, as `--no-overlap`; its variable takes `true` and
`false`. Where a path or a text is empty by default, nothing is set. `expertmesh COMMAND --help`
says the same in the terminal.

```console
$ expertmesh serve demo --port 8080
$ EXPERTMESH_PORT=8080 expertmesh serve demo
$ echo 'port: 8080' > mesh.yaml && expertmesh serve demo --config mesh.yaml
```"""

VARIABLES = {
    "EXPERTMESH_HOME": "Folder of models, compiled kernels and locks; by default `expertmesh` "
    "below `XDG_CACHE_HOME`, or `~/.cache`.",
    "EXPERTMESH_API_KEYS": "Keys that callers of a server must show, separated by commas.",
    "EXPERTMESH_ADMIN_KEYS": "Keys of those who drain expert workers and move experts, separated "
    "by commas.",
    "EXPERTMESH_API_KEY": "The key that `expertmesh chat` and `complete` show.",
    "EXPERTMESH_ADMIN_KEY": "The key that `expertmesh placement` shows.",
    "EXPERTMESH_DEBUG": "1 shows tracebacks of errors at start.",
    "EXPERTMESH_AMX": "0 does without AMX tiles where the processor has them. Bits of results "
    "differ then, so it is the same everywhere or nowhere.",
}
"""Variables that are no flags."""

PRIVATE_VARIABLES = frozenset(
    {
        "EXPERTMESH_ADMIN_KEY_DIGESTS",
        "EXPERTMESH_API_KEY_DIGESTS",
        "EXPERTMESH_LIFELINE_FD",
        "EXPERTMESH_READY_FD",
    }
)
"""Between a process and its children."""


@dataclass(frozen=True)
class Flag:
    """A flag of a command."""

    group: str
    name: str
    default: str
    text: str

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + self.name.removeprefix("--").replace("-", "_").upper()


def flags_of(command: str) -> list[Flag]:
    """All flags of a command, in the order of its help."""
    found = [
        _flag(argument)
        for argument in app[command].assemble_argument_collection(parse_docstring=True)
        if argument.show
    ]
    groups = list(dict.fromkeys(flag.group for flag in found))
    return sorted(found, key=lambda flag: groups.index(flag.group))


def _flag(argument: Argument) -> Flag:
    groups = argument.parameter.group
    assert isinstance(groups, tuple)
    (group,) = groups
    return Flag(group.name, argument.name, _default(argument), argument.parameter.help or "")


def _default(argument: Argument) -> str:
    value = argument.field_info.default
    shown = "" if value is None or value == "" else f"`{_as_flag(value)}`"
    choices = typing.get_args(argument.hint) if _is_choice(argument) else ()
    others = ", ".join(f"`{choice}`" for choice in choices if choice != value)
    return f"{shown}; or {others}" if others else shown


def _is_choice(argument: Argument) -> bool:
    return typing.get_origin(argument.hint) is typing.Literal


def _as_flag(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def configuration_page() -> str:
    """The whole document."""
    serve, gateway, worker = (flags_of(command) for command in COMMANDS)
    return page(
        "Configuration",
        INTRODUCTION,
        "## `expertmesh serve` and `expertmesh gateway`",
        "What only one of both has says so.",
        *_sections(_merged(serve, gateway)),
        "## `expertmesh expert-worker`",
        "`python -m expert_worker MODEL`, which is what the image starts, has the same flags, and "
        "`--metrics-port`; it reads no variables and no file.",
        *_sections(worker),
        "## Other variables of the environment",
        table(("variable", "what"), [(f"`{name}`", what) for name, what in VARIABLES.items()]),
        "## Exit codes",
        table(("code", "meaning"), _exit_codes()),
    )


def _merged(serve: list[Flag], gateway: list[Flag]) -> list[Flag]:
    """Flags of both, those of one alone marked."""
    known = {flag.name: flag for flag in gateway}
    common = [
        flag if flag == known.get(flag.name) else _marked(flag, COMMANDS[0]) for flag in serve
    ]
    names = {flag.name for flag in serve}
    return common + [_marked(flag, COMMANDS[1]) for flag in gateway if flag.name not in names]


def _marked(flag: Flag, command: str) -> Flag:
    text = f"*`{command}` only.* {flag.text}"
    return Flag(flag.group, flag.name, flag.default, text)


def _sections(flags: list[Flag]) -> Iterator[str]:
    for group in dict.fromkeys(flag.group for flag in flags):
        yield f"### {group}"
        rows = [
            (f"`{flag.name}`", f"`{flag.variable}`", flag.default, flag.text)
            for flag in flags
            if flag.group == group
        ]
        yield table(("flag", "variable", "default", "what"), rows)


def _exit_codes() -> Iterator[tuple[str, str]]:
    yield "0", "Done, or stopped on request."
    for kind in (StartupError, *StartupError.__subclasses__()):
        yield str(kind.exit_code), (kind.__doc__ or "").partition("\n")[0]
    yield str(INTERRUPTED), "Interrupted before anything was served."
