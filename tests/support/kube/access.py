"""Access control by Roles: what a service account may ask of the API server, and nothing else.

Who comes without a token may do everything, as the administrator of a test.
"""

from __future__ import annotations

from aiohttp import web

from tests.support.kube.resources import ROLE_BINDINGS, ROLES, ApiError, Json
from tests.support.kube.store import Key, Store

_PREFIX = "Bearer system:serviceaccount:"
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def token_of(namespace: str, account: str) -> str:
    """What a service account shows."""
    return f"system:serviceaccount:{namespace}:{account}"


class Access:
    """Refuses what no Role allows.

    Args:
        store: Has the Roles and who they are bound to.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def check(self, request: web.Request) -> None:
        """A fault hook of the API server; ApiError for what is not allowed."""
        shown = request.headers.get("Authorization", "")
        path = request.match_info
        if not shown.startswith(_PREFIX) or "plural" not in path:
            return
        namespace, account = shown.removeprefix(_PREFIX).split(":")
        wanted = _Wanted.of(request)
        if path.get("namespace") == namespace and any(
            wanted.is_allowed_by(rule) for rule in self._rules(namespace, account)
        ):
            return
        message = f'{wanted.resource} is forbidden: User "{account}" cannot {wanted.verb} it'
        raise ApiError(403, "Forbidden", message)

    def _rules(self, namespace: str, account: str) -> list[Json]:
        bound = [
            binding["roleRef"]["name"]
            for binding in self._store.list(ROLE_BINDINGS, namespace)
            for subject in binding.get("subjects", [])
            if (subject["kind"], subject["name"]) == ("ServiceAccount", account)
        ]
        roles = [self._store.get(Key(ROLES, namespace, name)) for name in bound]
        return [rule for role in roles for rule in role["rules"]]


class _Wanted:
    """What a request asks for, in the words of Roles."""

    def __init__(self, verb: str, group: str, resource: str, name: str) -> None:
        self.verb, self.group, self.resource, self.name = verb, group, resource, name

    @classmethod
    def of(cls, request: web.Request) -> _Wanted:
        """Reads method and path."""
        path = request.match_info
        name, part = path.get("name", ""), path.get("subresource")
        resource = f"{path['plural']}/{part}" if part else path["plural"]
        reading = "get" if name else "watch" if "watch" in request.query else "list"
        return cls(_VERBS.get(request.method, reading), path.get("group", ""), resource, name)

    def is_allowed_by(self, rule: Json) -> bool:
        """Whether one rule of a Role is enough."""
        names = rule.get("resourceNames")
        return (
            self.group in rule["apiGroups"]
            and self.resource in rule["resources"]
            and self.verb in rule["verbs"]
            and (names is None or self.name in names)
        )
