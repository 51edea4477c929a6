"""Flags of the commands that are clients of a running server: `chat`, `complete` and `top`.

Whatever is slow to import is imported by the command that needs it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from gateway.command.client_commands import ClientOptions

ServerUrl = Annotated[str, Parameter(help="Address of the HTTP API.")]


def chat(
    message: str | None = None,
    *,
    url: ServerUrl = "http://127.0.0.1:8000",
    model: str | None = None,
    system: str | None = None,
    max_tokens: int = 512,
    temperature: float | None = None,
    seed: int | None = None,
) -> int:
    """Talk to a running server; without a message, a dialogue until end of input.

    Parameters
    ----------
    message
        What to say.
    model
        Name of the model; by default the first one that the server lists.
    system
        Instructions that come before the dialogue.
    max_tokens
        Most tokens of an answer.
    temperature
        0 is greedy; by default the server's.
    seed
        The same seed gives the same answer.
    """
    from gateway.command.client_commands import run_chat

    return run_chat(message, system, _client_options(url, model, max_tokens, temperature, seed))


def complete(
    prompt: str,
    *,
    url: ServerUrl = "http://127.0.0.1:8000",
    model: str | None = None,
    max_tokens: int = 128,
    temperature: float | None = None,
    seed: int | None = None,
) -> int:
    """Continue a text with a running server.

    Parameters
    ----------
    prompt
        Text to continue.
    model
        Name of the model; by default the first one that the server lists.
    max_tokens
        Most tokens of the answer.
    temperature
        0 is greedy; by default the server's.
    seed
        The same seed gives the same answer.
    """
    from gateway.command.client_commands import run_complete

    return run_complete(prompt, _client_options(url, model, max_tokens, temperature, seed))


def top(
    *,
    url: ServerUrl = "http://127.0.0.1:8000",
    once: Annotated[bool, Parameter(negative="")] = False,
    output: Literal["text", "json"] = "text",
) -> int:
    """Show what a running mesh does, once a second: requests, expert workers, who is slow.

    Parameters
    ----------
    once
        Print what is now and end.
    output
        json prints what the server says, an event a line.
    """
    from gateway.command.top_command import follow, follow_as_json, options_of, show_once

    options = options_of(url, os.environ.get("EXPERTMESH_API_KEY"))
    if once:
        return show_once(options, as_json=output == "json")
    return follow_as_json(options) if output == "json" else follow(options)


def _client_options(
    url: str, model: str | None, max_tokens: int, temperature: float | None, seed: int | None
) -> ClientOptions:
    from gateway.command.client_commands import ClientOptions

    key = os.environ.get("EXPERTMESH_API_KEY")
    return ClientOptions(url.rstrip("/"), model, max_tokens, temperature, seed, key)
