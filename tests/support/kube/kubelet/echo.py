"""A program for pods of tests: tells what its container was given, then serves HTTP.

`python -m tests.support.kube.kubelet.echo FOLDER --host=ADDRESS ...`; or, as its preStop, `--wait`,
which ends once there is a file `go` in the folder `$SHARED`.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.processes import poll

PORT = 8080
_VARIABLES = ("POD_NAME", "CORES", "GREETING", "PASSWORD", "BOTH")
_WAIT_S = 50.0


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: the log is read by tests."""


def _serve(folder: Path, argv: list[str]) -> None:
    address = argv[0].removeprefix("--host=")
    files = {path.name: path.read_text() for path in sorted(folder.iterdir())}
    env = {name: os.environ[name] for name in _VARIABLES}
    seen = {"address": address, "argv": argv, "env": env, "files": files}
    sys.stdout.write(json.dumps(seen) + "\n")
    sys.stdout.flush()
    ThreadingHTTPServer((address, PORT), _Handler).serve_forever()


def _wait(shared: Path) -> None:
    (shared / "pre-stop").touch()
    poll((shared / "go").exists, timeout_s=_WAIT_S, what="it may go")


if __name__ == "__main__":
    if sys.argv[1] == "--wait":
        _wait(Path(os.environ["SHARED"]))
    else:
        _serve(Path(sys.argv[1]), sys.argv[2:])
