"""A Hugging Face hub on loopback: models with their files, checksums, and faults on demand."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiohttp import web

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_LARGE = (".safetensors", ".bin")
_REVISIONS = ("main", "v1", COMMIT)


class FakeHub:
    """One public model, of which all files are in one folder but for some in `original/`.

    Args:
        name: organisation/name.
        files: Path to content.

    Attributes:
        downloads: How often each file was sent, or a part of it.
        status: What every request is answered with; 0 for what is right.
        says: What every request is answered with, as by a portal; None for what is right.
        breaks_off: Files of which the next answer ends in the middle.
        corrupts: Files that are sent with another first byte, so many times.
    """

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        self.name = name
        self.files = dict(files)
        self.downloads: Counter[str] = Counter()
        self.num_requests = 0
        self.ranges: list[str] = []
        self.status = 0
        self.says: bytes | None = None
        self.breaks_off: set[str] = set()
        self.corrupts: Counter[str] = Counter()
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeHub]:
        """Answers while the context is open."""
        app = web.Application(middlewares=[self._door])
        app.router.add_get("/api/models/{org}/{name}", self._info)
        app.router.add_get("/api/models/{org}/{name}/revision/{revision}", self._info)
        app.router.add_get("/api/models/{org}/{name}/tree/{revision}", self._tree)
        app.router.add_get("/{org}/{name}/resolve/{revision}/{path:.+}", self._file)
        runner = web.AppRunner(app, shutdown_timeout=0.5)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            await runner.cleanup()

    @web.middleware
    async def _door(self, request: web.Request, handler: web.Handler) -> web.StreamResponse:
        part = request.match_info
        if "org" not in part:  # of no matter to models
            return web.Response(status=404)
        self.num_requests += 1
        if self.says is not None:
            return web.Response(body=self.says)
        if self.status:
            code = "GatedRepo" if self.status == 403 else ""
            return web.Response(status=self.status, headers={"X-Error-Code": code} if code else {})
        if f"{part['org']}/{part['name']}" != self.name:
            return web.Response(status=404, headers={"X-Error-Code": "RepoNotFound"})
        if part.get("revision", "main") not in _REVISIONS:
            return web.Response(status=404, headers={"X-Error-Code": "RevisionNotFound"})
        return await handler(request)

    async def _info(self, request: web.Request) -> web.Response:
        siblings = [{"rfilename": path} for path in self.files]
        return web.json_response({"id": self.name, "sha": COMMIT, "siblings": siblings})

    async def _tree(self, request: web.Request) -> web.Response:
        return web.json_response([self._entry(path) for path in self.files])

    def _entry(self, path: str) -> dict[str, object]:
        content = self.files[path]
        entry = {"type": "file", "path": path, "size": len(content), "oid": git_hash(content)}
        if path.endswith(_LARGE):
            lfs = {"oid": sha256(content), "size": len(content), "pointerSize": 130}
            entry["lfs"] = lfs
        return entry

    async def _file(self, request: web.Request) -> web.StreamResponse:
        path = request.match_info["path"]
        content = self.files[path]
        digest = sha256(content) if path.endswith(_LARGE) else git_hash(content)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        if request.method == "HEAD":
            return web.Response(headers={**headers, "Content-Length": str(len(content))})
        self.downloads[path] += 1
        if self.corrupts[path] > 0:
            self.corrupts[path] -= 1
            content = bytes([content[0] ^ 1]) + content[1:]
        begin = 0
        if asked := request.headers.get("Range"):
            self.ranges.append(asked)
            begin = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        response = web.StreamResponse(status=206 if begin else 200, headers=headers)
        response.content_length = len(content) - begin
        await response.prepare(request)
        if path in self.breaks_off:
            self.breaks_off.remove(path)
            await response.write(content[begin : len(content) // 2])
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(content[begin:])
        return response


def sha256(content: bytes) -> str:
    """As the hub names large files."""
    return hashlib.sha256(content).hexdigest()


def git_hash(content: bytes) -> str:
    """As git names small ones."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
