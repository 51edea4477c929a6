"""How a gateway gets at the API server: the access that its pod has, or a kubeconfig file.

The official client is imported when it is needed, as it takes half a second.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from expertmesh.errors import StartupError
from expertmesh.settings import MeshOptions
from gateway.cluster.fields import text_at

if TYPE_CHECKING:
    from kubernetes.aio.client import ApiClient, Configuration

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_DEFAULT_NAMESPACE = "default"


@dataclass(frozen=True)
class Credentials:
    """What it takes to talk to an API server."""

    configuration: Configuration
    namespace: str
    """The gateway's own."""

    def client(self) -> ApiClient:
        """A new client, for the event loop that first uses it."""
        from kubernetes.aio.client import ApiClient

        return ApiClient(self.configuration)


@dataclass(frozen=True)
class ClusterAccess:
    """Where credentials come from."""

    kubeconfig: str = ""
    """Absolute path of a file; empty: what Kubernetes gives to pods."""

    @classmethod
    def of(cls, mesh: MeshOptions) -> Self:
        """What the settings say."""
        given = mesh.kubeconfig
        return cls(str(Path(given).expanduser().absolute()) if given else "")

    async def load(self) -> Credentials:
        """Reads them.

        Raises:
            StartupError: There are none, or the client is not installed.
        """
        try:
            return await _of_file(self.kubeconfig) if self.kubeconfig else _of_pod()
        except ModuleNotFoundError as error:
            raise StartupError(
                f"the client of Kubernetes is not installed: {error}",
                fix="pip install 'expertmesh[k8s]'",
            ) from error


def _of_pod() -> Credentials:
    from kubernetes.aio.client import Configuration
    from kubernetes.aio.config import ConfigException, load_incluster_config

    configuration = Configuration()
    try:
        load_incluster_config(configuration)
    except (ConfigException, OSError) as error:
        raise StartupError(
            f"no access to Kubernetes: {error}",
            fix="run in a pod with a service account, or name a file with --kubeconfig",
        ) from error
    try:
        namespace = _NAMESPACE_FILE.read_text().strip()
    except OSError:
        namespace = _DEFAULT_NAMESPACE
    return Credentials(configuration, namespace)


async def _of_file(path: str) -> Credentials:
    from kubernetes.aio.client import Configuration
    from kubernetes.aio.config import ConfigException, load_kube_config
    from yaml import YAMLError

    configuration = Configuration()
    try:
        if not os.access(path, os.R_OK):  # the client only warns of that
            raise ConfigException("there is no such file, or it cannot be read")
        loader = await load_kube_config(
            path, client_configuration=configuration, persist_config=False
        )
    except (ConfigException, OSError, YAMLError, AttributeError, TypeError, ValueError) as error:
        raise StartupError(
            f"kubeconfig {path} cannot be used: {error}", fix="name another one with --kubeconfig"
        ) from error
    namespace = text_at(loader.current_context, "context", "namespace")
    return Credentials(configuration, namespace or _DEFAULT_NAMESPACE)
