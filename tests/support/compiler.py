"""`python -m tests.support.compiler HOW FILE`: plays the process that compiles kernels."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from expertmesh.errors import CheckpointError
from expertmesh.processes import announce_failure, watch_lifeline


def main(how: str, file: Path) -> int:
    """Adds its process id to the file, as a line, and then does as it is told."""
    watch_lifeline(lambda: os._exit(0))
    with file.open("a") as lines:
        lines.write(f"{os.getpid()}\n")
    if how == "refuse":
        announce_failure(CheckpointError("no such model"))
        return CheckpointError.exit_code
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        threading.Event().wait(60)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
