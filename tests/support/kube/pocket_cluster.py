"""A cluster in one process: API server, controllers, a kubelet, proxies to Services.

All of it runs on an event loop in a thread of its own, so that tests may block.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from tests.support.kube.access import Access, token_of
from tests.support.kube.api_server import FakeApiServer
from tests.support.kube.controllers.loop import Controllers
from tests.support.kube.kubectl import Kubectl
from tests.support.kube.kubelet.kubelet import Kubelet
from tests.support.kube.resources import Json, Resource
from tests.support.kube.service_proxy import ServiceProxy
from tests.support.processes import poll

_T = TypeVar("_T")
_CALL_S = 30.0
_END_S = 30.0


class PocketCluster:
    """Made by `pocket_cluster`.

    Attributes:
        folder: For whatever tests need; is gone with the cluster.
        kubeconfig: Leads to the API server.
        kubectl: The real one, for this cluster.
    """

    def __init__(self, folder: Path, namespace: str) -> None:
        self.folder, self.namespace = folder, namespace
        self.kubeconfig = folder / "kubeconfig"
        self.kubectl = Kubectl(self.kubeconfig, folder)
        self._api: FakeApiServer
        self._kubelet: Kubelet
        self._stack = AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pocket-cluster")

    def start(self) -> None:
        """Starts all parts."""
        self._thread.start()
        self._run(self._start())

    def stop(self) -> None:
        """Ends all parts, and every process of every pod."""
        try:
            self._run(self._stack.aclose())
            self._run(self._loop.shutdown_default_executor())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_END_S)
            self._loop.close()

    def call(self, function: Callable[[FakeApiServer, Kubelet], _T]) -> _T:
        """What a function says of API server and kubelet, on their loop."""

        async def called() -> _T:
            return function(self._api, self._kubelet)

        return self._run(called())

    def list(self, resource: Resource) -> list[Json]:
        """All objects of a kind in the namespace."""
        return self.call(lambda api, _: api.store.list(resource, self.namespace))

    def wait(
        self,
        resource: Resource,
        condition: Callable[[list[Json]], bool],
        *,
        what: str,
        timeout_s: float,
    ) -> float:
        """Waits until all objects of a kind are so; the seconds that it took.

        Fails with what the pods have said.
        """
        try:
            return poll(lambda: condition(self.list(resource)), timeout_s=timeout_s, what=what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def logs(self) -> str:
        """The last lines of all containers."""
        return self.call(lambda _, kubelet: kubelet.logs())

    def log(self, pod: str, container: str) -> str:
        """All that a container has said."""
        return self.call(lambda _, kubelet: kubelet.runner(pod).log(container).read_text())

    def kill_container(self, pod: str, container: str) -> None:
        """kill -9 of its process and of all that it has started."""
        self.call(lambda _, kubelet: kubelet.runner(pod).container(container).kill())

    def port_of(self, service: str, port: str) -> int:
        """A port of this machine that leads to ready pods of a Service."""

        async def opened() -> int:
            proxy = ServiceProxy(self._api.store, self.namespace, service, port)
            await self._stack.enter_async_context(proxy)
            return proxy.port

        return self._run(opened())

    def kubeconfig_of(self, account: str) -> Path:
        """A file for pods of a service account, which may do what its Roles say."""
        path = self.folder / f"kubeconfig-{account}"
        token = token_of(self.namespace, account)
        return self.call(lambda api, _: api.write_kubeconfig(path, self.namespace, token))

    @contextmanager
    def under(
        self, fault: Callable[[FakeApiServer], AbstractContextManager[None]]
    ) -> Iterator[None]:
        """A fault of the API server meanwhile."""
        made = self.call(lambda api, _: fault(api))
        self.call(lambda *_: made.__enter__())
        try:
            yield
        finally:
            self.call(lambda *_: made.__exit__(None, None, None))

    def cut_off(self, account: str) -> AbstractContextManager[None]:
        """The API server is away for pods of a service account alone."""
        token = token_of(self.namespace, account)
        return self.under(lambda api: api.outage(token))

    def _run(self, coroutine: Coroutine[object, None, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_CALL_S)

    async def _start(self) -> None:
        enter = self._stack.enter_async_context
        self._api = await enter(FakeApiServer())
        self._api.faults.append(Access(self._api.store).check)
        self._api.write_kubeconfig(self.kubeconfig, self.namespace)
        await enter(Controllers(self._api.store))
        self._kubelet = await enter(Kubelet(self._api.url, self.folder / "pods"))


@contextmanager
def pocket_cluster(namespace: str) -> Iterator[PocketCluster]:
    """Runs one without any object in it."""
    folder = Path(tempfile.mkdtemp(prefix="expertmesh-cluster-"))
    cluster = PocketCluster(folder, namespace)
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
