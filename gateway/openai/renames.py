"""Names of parameters in errors, for APIs whose requests become chat requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from expertmesh.errors import RequestError

Renames = Sequence[tuple[str, str]]
"""(path in the chat request, path in the client's request); the first that fits counts."""


@contextmanager
def renamed(renames: Renames) -> Iterator[None]:
    """Lets request errors inside name the parameters that the client sent."""
    try:
        yield
    except RequestError as error:
        if error.param is not None:
            new = rename(error.param, renames)
            error.message = error.message.replace(error.param, new)
            error.param = new
            error.args = (error.message,)
        raise


def rename(param: str, renames: Renames) -> str:
    """The client's name of a parameter of the chat request."""
    for old, new in renames:
        if param == old or param.startswith(f"{old}."):
            return new + param.removeprefix(old)
    return param
