"""What the number of expert workers is read from and written to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from expertmesh.errors import ExpertMeshError


class ScaleError(ExpertMeshError):
    """The number could not be read or written; it is tried again.

    Args:
        cause: The same for every try that fails in the same way, such as `403` or `unreachable`.
        message: For people.
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True)
class Scale:
    """What was read."""

    replicas: int
    """Pods that are asked for."""
    version: str
    """Changes with every write of anybody."""


class ScaleTarget(Protocol):
    """A StatefulSet, as far as its number of pods goes. One task uses it."""

    async def read(self) -> Scale:
        """The number now.

        Raises:
            ScaleError: It cannot be read.
        """

    async def write(self, replicas: int, seen: Scale) -> None:
        """Asks for so many pods, if nobody has written since.

        Args:
            replicas: Pods.
            seen: What this was decided from.

        Raises:
            ScaleError: It cannot be written, or somebody has written.
        """

    async def close(self) -> None:
        """Ends connections."""
