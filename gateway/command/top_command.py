"""`expertmesh top`: what a running mesh does, once a second, from /v1/moe/stream."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from expertmesh.errors import PeerError, StartupError
from gateway.command.client_commands import ClientOptions, events

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_PATH = "/v1/moe/stream"
_SILENT_S = 5.0
"""Without an event, of which there is one a second."""
_AGAIN_S = 1.0

Event = dict[str, Any]


def show_once(options: ClientOptions, *, as_json: bool) -> int:
    """Prints what is now; returns the exit code.

    Raises:
        StartupError: No server answers.
        PeerError: It refuses, or breaks off.
    """
    for event in events(options, "GET", _PATH):
        if as_json:
            sys.stdout.write(json.dumps(event) + "\n")
        else:
            _console().print(_overview(options.url, event))
        return 0
    raise PeerError("the server is stopping")


def follow_as_json(options: ClientOptions) -> int:
    """Prints an event a line until the server stops; returns the exit code. Raises as above."""
    for event in events(options, "GET", _PATH):
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()
    return 0


def follow(options: ClientOptions) -> int:
    """Shows what is now until interrupted, and that nobody answers while that is so.

    Raises:
        StartupError: No server answered at first.
        PeerError: It refused.
    """
    from rich.live import Live

    views = _views(options)
    first = next(views)  # or the error is all that is said
    with Live(first, console=_console(), screen=sys.stdout.isatty(), auto_refresh=False) as live:
        try:
            for view in views:
                live.update(view, refresh=True)
        except KeyboardInterrupt:
            return 0
    return 0


def _views(options: ClientOptions) -> Iterator[RenderableType]:
    """Never ends: a server that is gone may come back."""
    from rich.text import Text

    seen = False
    while True:
        problem = "the server stops"
        try:
            for event in events(options, "GET", _PATH):
                seen = True
                yield _overview(options.url, event)
        except (PeerError, StartupError) as error:
            if not seen:
                raise
            problem = str(error)
        yield Text(f"{options.url}: {problem}", style="bold red")
        time.sleep(_AGAIN_S)


def _overview(url: str, event: Event) -> RenderableType:
    from gateway.command.top_view import overview

    return overview(url, event)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def options_of(url: str, api_key: str | None) -> ClientOptions:
    """To follow a server; one that is silent for some seconds counts as gone."""
    return ClientOptions(url.rstrip("/"), api_key=api_key, timeout_s=_SILENT_S)
