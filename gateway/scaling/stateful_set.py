"""The number of pods of a StatefulSet, by its `scale` subresource.

A write names the version that was read, so a number that somebody else has written since is never
overwritten. Reading and writing together take less time than a lease goes on without its leader, if
it lasts 15 s as by default: one that was replaced cannot write behind its successor's back then.
"""

from __future__ import annotations

from http import HTTPStatus

from gateway.cluster.api import ClusterApi, ClusterError
from gateway.cluster.fields import number_at, text_at
from gateway.scaling.scale_target import Scale, ScaleError

_TIMEOUT_S = 2.0
_MERGE_PATCH = "application/merge-patch+json"


class StatefulSetScale:
    """A ScaleTarget of Kubernetes.

    Args:
        api: The API server.
        name: Of the StatefulSet, in the gateway's namespace.
    """

    def __init__(self, api: ClusterApi, name: str) -> None:
        self._api = api
        self._name = name
        self._path = f"/apis/apps/v1/namespaces/{api.namespace}/statefulsets/{name}/scale"

    async def read(self) -> Scale:
        """See ScaleTarget."""
        try:
            answer = await self._api.request("GET", self._path, timeout_s=_TIMEOUT_S)
        except ClusterError as error:
            raise self._failure("read", error) from error
        version = text_at(answer, "metadata", "resourceVersion")
        if not version:
            raise ScaleError("no_scale", f"{self._path} has no metadata.resourceVersion")
        return Scale(number_at(answer, "spec", "replicas"), version)

    async def write(self, replicas: int, seen: Scale) -> None:
        """See ScaleTarget."""
        body = {"metadata": {"resourceVersion": seen.version}, "spec": {"replicas": replicas}}
        try:
            await self._api.request(
                "PATCH", self._path, body=body, content_type=_MERGE_PATCH, timeout_s=_TIMEOUT_S
            )
        except ClusterError as error:
            raise self._failure("write", error) from error

    async def close(self) -> None:
        """See ScaleTarget."""
        await self._api.close()

    def _failure(self, what: str, error: ClusterError) -> ScaleError:
        hint = _HINTS.get(error.status, "")
        cause = str(error.status) if error.status else "unreachable"
        return ScaleError(
            cause,
            f"cannot {what} the scale of statefulset {self._name} in namespace "
            f"{self._api.namespace}: {error}" + f" ({hint})" * bool(hint),
        )


_HINTS: dict[int, str] = {
    HTTPStatus.FORBIDDEN: "its Role needs get and patch of statefulsets/scale",
    HTTPStatus.NOT_FOUND: "see --scale-target",
    HTTPStatus.CONFLICT: "somebody else has written it",
}
