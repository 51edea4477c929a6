"""A real control plane where its binaries are at hand: etcd, API server, controller manager."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from tests.support.processes import free_port, poll

TOKEN = "of-the-tests"
_VARIABLES = ("ETCD_BIN", "KUBE_APISERVER_BIN", "KUBE_CONTROLLER_MANAGER_BIN")
_START_S, _END_S = 60.0, 20.0


def binaries() -> dict[str, str] | None:
    """Paths by the variables that name them; None unless all are set."""
    found = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    return found if len(found) == len(_VARIABLES) else None


class ControlPlane:
    """Runs while the context of `control_plane` is open.

    Args:
        paths: Of the binaries.
        folder: For data, certificates and logs.
    """

    def __init__(self, paths: dict[str, str], folder: Path) -> None:
        self._paths, self._folder = paths, folder
        self._etcd_url = f"http://127.0.0.1:{free_port()}"
        self._port = free_port()
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        """Of the API server."""
        return f"https://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Starts all and waits until the API server is ready."""
        key = self._folder / "account.key"
        make = ["openssl", "genrsa", "-out", str(key), "2048"]
        subprocess.run(make, check=True, capture_output=True, timeout=_START_S)
        (self._folder / "tokens.csv").write_text(f'{TOKEN},admin,admin,"system:masters"\n')
        (self._folder / "kubeconfig").write_text(self.kubeconfig())
        peer = f"http://127.0.0.1:{free_port()}"
        self._run(
            "ETCD_BIN",
            f"--data-dir={self._folder / 'etcd'}",
            f"--listen-client-urls={self._etcd_url}",
            f"--advertise-client-urls={self._etcd_url}",
            f"--listen-peer-urls={peer}",
        )
        self._start_server()
        self._run(
            "KUBE_CONTROLLER_MANAGER_BIN",
            f"--kubeconfig={self._folder / 'kubeconfig'}",
            f"--service-account-private-key-file={key}",
            "--controllers=*",
            "--leader-elect=false",
        )

    def restart_server(self) -> None:
        """A new API server knows nothing of what was before it."""
        self._end("KUBE_APISERVER_BIN")
        self._start_server()

    def stop(self) -> None:
        """Ends all, in the reverse order."""
        for name in reversed(_VARIABLES):
            self._end(name)

    def _start_server(self) -> None:
        key = self._folder / "account.key"
        self._run(
            "KUBE_APISERVER_BIN",
            f"--etcd-servers={self._etcd_url}",
            f"--secure-port={self._port}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={self._folder / 'certificates'}",
            f"--token-auth-file={self._folder / 'tokens.csv'}",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            f"--service-account-issuer={self.url}",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--disable-admission-plugins=ServiceAccount",
            "--authorization-mode=RBAC",
        )
        poll(self._is_ready, timeout_s=_START_S, what="the API server is ready")

    def _run(self, name: str, *flags: str) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            argv = [self._paths[name], *flags]
            self._running[name] = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _end(self, name: str) -> None:
        process = self._running.pop(name, None)
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_END_S)

    def _is_ready(self) -> bool:
        # It makes the namespace after it says that it is ready.
        return all(map(self._answers, ("/readyz", "/api/v1/namespaces/default")))

    def _answers(self, path: str) -> bool:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        request = urllib.request.Request(self.url + path, headers=headers)
        context = ssl._create_unverified_context()
        try:
            with urllib.request.urlopen(request, timeout=2.0, context=context) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def kubeconfig(self, token: str = TOKEN) -> str:
        """Text of a file for who has a token: the administrator, or another one."""
        cluster = {"server": self.url, "insecure-skip-tls-verify": True}
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "test", "cluster": cluster}],
                "users": [{"name": "test", "user": {"token": token}}],
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
                "current-context": "test",
            }
        )


@contextmanager
def control_plane(paths: dict[str, str]) -> Iterator[ControlPlane]:
    """Runs one with data of its own."""
    folder = Path(tempfile.mkdtemp(prefix="expertmesh-control-plane-"))
    plane = ControlPlane(paths, folder)
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()
        shutil.rmtree(folder, ignore_errors=True)
