"""A Lease of Kubernetes as what it says about the leader.

No time in it is compared with a clock of ours: clocks of machines differ. A candidate sees only
whether the record changes while time passes here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from gateway.cluster.fields import JsonObject, number_at, text_at

_TERMS_PER_SECOND = 1 << 20


@dataclass(frozen=True)
class LeaseRecord:
    """One version of a Lease."""

    holder: str = ""
    """Empty if it was given back."""
    num_terms: int = 0
    """Terms of leaders so far, which Kubernetes calls transitions."""
    duration_s: int = 0
    """For how long its holder counts on it."""
    renewed: str = ""
    """Changes whenever the holder shows that it is there."""
    version: str = ""
    """A write names the one that it replaces; empty for a Lease that is to be made."""
    created_s: int = 0
    """By the API server's clock, in seconds since 1970."""
    acquired: str = ""

    @classmethod
    def read(cls, lease: JsonObject) -> LeaseRecord:
        """Of a Lease object."""
        return cls(
            text_at(lease, "spec", "holderIdentity"),
            number_at(lease, "spec", "leaseTransitions"),
            number_at(lease, "spec", "leaseDurationSeconds"),
            text_at(lease, "spec", "renewTime"),
            text_at(lease, "metadata", "resourceVersion"),
            _seconds(text_at(lease, "metadata", "creationTimestamp")),
            text_at(lease, "spec", "acquireTime"),
        )

    @property
    def token(self) -> int:
        """Fencing token of the present term.

        It grows with each term, and with each Lease of the name: one that was deleted and made anew
        counts terms from the start, so the time when it was made comes first. It is one clock, the
        API server's, that says so.
        """
        return self.created_s * _TERMS_PER_SECOND + self.num_terms

    def taken(self, holder: str, duration_s: float) -> LeaseRecord:
        """The next term."""
        now = _now()
        return replace(
            self,
            holder=holder,
            num_terms=self.num_terms + 1,
            duration_s=math.ceil(duration_s),
            renewed=now,
            acquired=now,
        )

    def renewed_now(self) -> LeaseRecord:
        """The same term, still led."""
        return replace(self, renewed=_now())

    def released(self) -> LeaseRecord:
        """Nobody's."""
        return replace(self, holder="", duration_s=1, renewed=_now())

    def above(self, token: int) -> LeaseRecord:
        """The same term with a token higher than another one."""
        return replace(self, num_terms=self.num_terms + max(0, token + 1 - self.token))

    def to_lease(self, name: str, namespace: str) -> JsonObject:
        """As a Lease object; its times are for people."""
        metadata: JsonObject = {"name": name, "namespace": namespace}
        if self.version:
            metadata["resourceVersion"] = self.version
        spec: JsonObject = {
            "leaseDurationSeconds": self.duration_s,
            "leaseTransitions": self.num_terms,
            "acquireTime": self.acquired,
            "renewTime": self.renewed,
        }
        if self.holder:  # servers refuse an empty one
            spec["holderIdentity"] = self.holder
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _seconds(timestamp: str) -> int:
    """Since 1970; 0 for what is no time."""
    try:
        return int(datetime.fromisoformat(timestamp).timestamp())
    except ValueError:
        return 0
