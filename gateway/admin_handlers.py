"""Endpoints of operators: who holds which expert, and moves by hand."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from aiohttp import hdrs, web

from expertmesh.errors import AuthenticationError
from gateway.api_keys import ApiKeys, bearer_key
from gateway.openai.handlers import json_response
from gateway.placement.operator import Operator

PREFIX = "/admin/"


@dataclass(frozen=True)
class AdminAccess:
    """Who may look after expert workers: callers with an admin key.

    Without any such key, everybody who can reach the server, if only this machine can and nobody
    needs a key for anything else.
    """

    keys: ApiKeys = field(default_factory=ApiKeys)
    is_private: bool = False
    """Only this machine can reach the server, and no API key is set."""

    def check(self, request: web.Request) -> None:
        """Refuses others.

        Raises:
            AuthenticationError: The key is missing or not accepted, or there is none that would be.
        """
        if self.keys.required:
            self.keys.check(bearer_key(request.headers.get("Authorization")))
        elif not self.is_private:
            raise AuthenticationError(
                "there is no admin key: start the gateway with EXPERTMESH_ADMIN_KEYS"
            )
        elif hdrs.ORIGIN in request.headers:  # a web page, in the browser of somebody here
            raise AuthenticationError("web pages need an admin key")


class AdminHandlers:
    """Endpoints under /admin/.

    Args:
        operator: Does what is asked.
    """

    def __init__(self, operator: Operator) -> None:
        self._operator = operator

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Puts the endpoints."""
        router.add_get("/admin/placement", self.placement)
        router.add_post("/admin/placement/rebalance", self.rebalance)
        router.add_post("/admin/workers/{worker_id}/drain", self.drain)

    async def placement(self, request: web.Request) -> web.Response:
        """Who holds what, and what is planned."""
        report = await asyncio.to_thread(lambda: self._operator.report().to_json())
        return json_response(report)

    async def rebalance(self, request: web.Request) -> web.Response:
        """Plans at once, and for every gain."""
        self._operator.rebalance()
        return json_response({"status": "accepted"}, status=202)

    async def drain(self, request: web.Request) -> web.Response:
        """Makes an expert worker hand over and end."""
        await asyncio.to_thread(self._operator.drain, request.match_info["worker_id"])
        return json_response({"status": "accepted"}, status=202)
