"""Cross-origin requests: which web pages may call the API from a browser. Off by default."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import hdrs, web

_ALLOWED = {
    "Access-Control-Allow-Methods": "GET, HEAD, POST, OPTIONS",
    "Access-Control-Allow-Headers": "*, Authorization",
    "Access-Control-Max-Age": "600",
}


class Cors:
    """Answers browsers.

    Args:
        origins: Allowed origins, e.g. "https://chat.example"; "*" allows all; empty none.
    """

    def __init__(self, origins: Sequence[str] = ()) -> None:
        self._origins = frozenset(origins)

    def is_preflight(self, request: web.BaseRequest) -> bool:
        """True for the question of a browser whether it may ask; it comes without keys."""
        return (
            request.method == hdrs.METH_OPTIONS
            and "Access-Control-Request-Method" in request.headers
            and self._allowed(request) is not None
        )

    def preflight(self) -> web.Response:
        """The answer to it; `mark` adds the origin."""
        return web.Response(status=204, headers=_ALLOWED)

    def mark(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Tells the browser whether the page may read the response."""
        origin = self._allowed(request)
        if origin is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = "*"
            response.headers.add("Vary", "Origin")

    def _allowed(self, request: web.BaseRequest) -> str | None:
        origin = request.headers.get("Origin")
        if origin is None or not self._origins:
            return None
        return origin if origin in self._origins or "*" in self._origins else None
