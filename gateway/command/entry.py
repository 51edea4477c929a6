"""The console script `expertmesh`: hears SIGTERM before it imports anything that takes time.

The first process of a container gets no signal that it has no handler for. What is started later
has handlers of its own.
"""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Runs the command line; told to stop before there is anything to stop, it ends with 0."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: os._exit(0))
    from gateway.command import cli

    cli.main()
