"""An API server of Kubernetes for tests: objects, versions, watches, scale, and faults on demand.

It keeps what clients rely on as the real one does; `tests/cluster/test_api_contract.py` checks that
on both. There is no validation, no admission and no access control. It listens on loopback only and
belongs to the event loop that it is started in.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml
from aiohttp import web

from tests.support.kube import documents, subresources
from tests.support.kube.patches import patched
from tests.support.kube.resources import (
    NAMESPACES,
    RESOURCES,
    ApiError,
    Json,
    Resource,
    bad_request,
    conflict,
)
from tests.support.kube.selectors import selector
from tests.support.kube.store import Key, Store, refuse_unknown_version
from tests.support.kube.watches import Watches, WatchRequest, timeout_of

Fault = Callable[[web.Request], Awaitable[web.StreamResponse | None]]
"""Answers a request, or stalls it, or returns None to leave it to the server."""

_BY_PATH = {(each.group, each.version, each.plural): each for each in RESOURCES}
_YES = ("1", "true", "True")


class FakeApiServer:
    """Serves while the context is open.

    Attributes:
        store: All objects; tests may change them directly.
        faults: Are asked in order before every request.
        requests: Method and path of all requests so far.
    """

    def __init__(self) -> None:
        self.store = Store()
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self._watches = Watches(self.store)
        self._running: dict[int, web.Request] = {}
        self._runner = web.AppRunner(self._application(), shutdown_timeout=0.5)
        self._port = 0
        for name in ("default", "kube-system"):
            self.store.create(NAMESPACES, {"metadata": {"name": name}})

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cut_connections("")
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    def write_kubeconfig(self, path: Path, namespace: str = "default", token: str = "") -> Path:
        """Writes a file that has kubectl and clients come here, with a token if there is one."""
        path.write_text(kubeconfig(self.url, namespace, token))
        return path

    # --- faults ---

    def drop_watches(self) -> None:
        """Ends all watches that are open."""
        self._watches.drop()

    def gone(self) -> None:
        """Forgets the history: whoever watches from an earlier version is told 410."""
        self.store.forget_history()

    @contextmanager
    def missed_events(self) -> Iterator[None]:
        """Watches are never told what changes meanwhile."""
        self.store.hides_changes = True
        try:
            yield
        finally:
            self.store.hides_changes = False

    @contextmanager
    def silent_watches(self) -> Iterator[None]:
        """Watches stay open and are told nothing; what they missed comes afterwards."""
        self._watches.are_silent = True
        try:
            yield
        finally:
            self._watches.are_silent = False
            self.store.wake()

    @contextmanager
    def outage(self, token: str = "") -> Iterator[None]:
        """Connections are reset, old and new: all of them, or those of the holders of a token."""

        async def reset(request: web.Request) -> web.StreamResponse | None:
            if not _shows(request, token):
                return None
            _abort(request.transport)
            return web.Response(status=503)

        self.faults.insert(0, reset)
        self._cut_connections(token)
        try:
            yield
        finally:
            self.faults.remove(reset)

    def _cut_connections(self, token: str) -> None:
        for request in list(self._running.values()):
            if _shows(request, token):
                _abort(request.transport)
        self._watches.drop()

    # --- requests ---

    def _application(self) -> web.Application:
        app = web.Application(middlewares=[self._answer], client_max_size=8 * 2**20)
        core, group = "/api/{version}", "/apis/{group}/{version}"
        app.router.add_get("/version", _document(lambda _: documents.VERSION))
        app.router.add_get("/api", _document(lambda _: documents.core_versions()))
        app.router.add_get("/apis", _document(lambda _: documents.groups()))
        app.router.add_get("/openapi/v3", _document(lambda _: documents.open_api_index()))
        for root in sorted({each.root for each in RESOURCES}):
            app.router.add_get(root, _document(lambda r: documents.resources_of(r.path)))
            app.router.add_get(
                f"/openapi/v3{root}",
                _document(lambda r: documents.open_api(r.path.removeprefix("/openapi/v3"))),
            )
        for root in (core, group):
            for scope in (root + "/namespaces/{namespace}", root):
                app.router.add_route("*", scope + "/{plural}", self._collection)
                app.router.add_route("*", scope + "/{plural}/{name}", self._object)
                app.router.add_route(
                    "*", scope + "/{plural}/{name}/{subresource}", self._subresource
                )
        return app

    @web.middleware
    async def _answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        self._running[id(request)] = request
        try:
            for fault in list(self.faults):
                if (response := await fault(request)) is not None:
                    return response
            return await handler(request)
        except ApiError as error:
            return error.response()
        finally:
            del self._running[id(request)]

    async def _collection(self, request: web.Request) -> web.StreamResponse:
        resource, namespace = _resource(request), request.match_info.get("namespace", "")
        if request.method == "POST":
            item = await _body(request)
            if namespace:
                self.store.get(Key(NAMESPACES, "", namespace))
            return _json(self.store.create(resource, item, namespace), status=201)
        query = request.query
        matches = selector(query.get("labelSelector", ""), query.get("fieldSelector", ""))
        if request.method == "DELETE":
            for item in self.store.list(resource, namespace, matches):
                self.store.delete(_key_of(resource, item))
        elif query.get("watch") in _YES:
            return await self._watch(request, resource, namespace)
        else:
            refuse_unknown_version(self.store, query.get("resourceVersion", ""))
        return _json(
            {
                "kind": f"{resource.kind}List",
                "apiVersion": resource.api_version,
                "metadata": {"resourceVersion": str(self.store.version)},
                "items": self.store.list(resource, namespace, matches),
            }
        )

    async def _watch(
        self, request: web.Request, resource: Resource, namespace: str
    ) -> web.StreamResponse:
        query = request.query
        wanted = WatchRequest(
            resource=resource,
            namespace=namespace,
            matches=selector(query.get("labelSelector", ""), query.get("fieldSelector", "")),
            version=query.get("resourceVersion", ""),
            timeout_s=timeout_of(query.get("timeoutSeconds")),
            wants_bookmarks=query.get("allowWatchBookmarks") in _YES,
            wants_all=query.get("sendInitialEvents") in _YES,
        )
        return await self._watches.serve(request, wanted)

    async def _object(self, request: web.Request) -> web.StreamResponse:
        key = _key(request)
        match request.method:
            case "GET":
                return _json(self.store.get(key))
            case "PUT":
                body = await _body(request)
                return _json(self.store.update(key, lambda old: _without_status(key, old, body)))
            case "PATCH":
                change = await _patch(request)
                return _json(
                    self.store.update(key, lambda old: _without_status(key, old, change(old)))
                )
            case "DELETE":
                return await self._delete(request, key)
        raise ApiError(405, "MethodNotAllowed", f"{request.method} of an object")

    async def _delete(self, request: web.Request, key: Key) -> web.Response:
        options = await _body(request) if request.can_read_body else {}
        wanted = options.get("preconditions") or {}
        item = self.store.get(key)
        for name in ("uid", "resourceVersion"):
            if wanted.get(name) not in (None, item["metadata"][name]):
                raise conflict(key.resource, key.name)
        grace = options.get("gracePeriodSeconds", request.query.get("gracePeriodSeconds"))
        return _json(self.store.delete(key, None if grace is None else int(grace)))

    async def _subresource(self, request: web.Request) -> web.StreamResponse:
        key, name = _key(request), request.match_info["subresource"]
        if name not in key.resource.subresources:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        match request.method:
            case "GET":
                return _json(subresources.read(self.store, key, name))
            case "PUT":
                body = await _body(request)
                return _json(subresources.write(self.store, key, name, lambda _: body))
            case "PATCH":
                change = await _patch(request)
                return _json(subresources.write(self.store, key, name, change))
            case "POST":
                body = await _body(request)
                return _json(subresources.post(self.store, key, name, body), status=201)
        raise ApiError(405, "MethodNotAllowed", f"{request.method} of {name}")


def kubeconfig(url: str, namespace: str, token: str) -> str:
    """The text of a file that leads to a server."""
    named = {"cluster": "test", "user": "test", "namespace": namespace}
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": url}}],
            "users": [{"name": "test", "user": {"token": token} if token else {}}],
            "contexts": [{"name": "test", "context": named}],
            "current-context": "test",
        }
    )


def _shows(request: web.Request, token: str) -> bool:
    return not token or request.headers.get("Authorization") == f"Bearer {token}"


def _abort(transport: asyncio.BaseTransport | None) -> None:
    if isinstance(transport, asyncio.WriteTransport):
        transport.abort()


def _document(
    make: Callable[[web.Request], Json],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handler(request: web.Request) -> web.Response:
        return _json(make(request))

    return handler


def _json(item: object, *, status: int = 200) -> web.Response:
    return web.Response(status=status, text=json.dumps(item), content_type="application/json")


async def _body(request: web.Request) -> Json:
    try:
        body = json.loads(await request.read())
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise bad_request("the body is not an object")
    return body


async def _patch(request: web.Request) -> Callable[[Json], Json]:
    try:
        patch = json.loads(await request.read())
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    return lambda old: patched(old, patch, request.content_type)


def _resource(request: web.Request) -> Resource:
    path = request.match_info
    found = _BY_PATH.get((path.get("group", ""), path["version"], path["plural"]))
    if found is None:
        raise ApiError(404, "NotFound", "the server could not find the requested resource")
    return found


def _key(request: web.Request) -> Key:
    path = request.match_info
    return Key(_resource(request), path.get("namespace", ""), path["name"])


def _key_of(resource: Resource, item: Json) -> Key:
    return Key(resource, item["metadata"].get("namespace", ""), item["metadata"]["name"])


def _without_status(key: Key, old: Json, new: Json) -> Json:
    """Who writes an object does not write its status, if that is a resource of its own."""
    if "status" not in key.resource.subresources:
        return new
    kept = {"status": old["status"]} if "status" in old else {}
    return {**{name: value for name, value in new.items() if name != "status"}, **kept}
