"""Calls of a dispatch to expert workers, and how they end."""

from __future__ import annotations

from dataclasses import dataclass

from attention_worker.direct_connection import DirectConnection
from attention_worker.outcomes import Outcomes
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire_encode import CallId
from expertmesh_kernels.dispatch import WorkerRows


@dataclass(eq=False)
class Call:
    """One ForwardRequest and where its outcome goes. The stream's lock guards what changes."""

    call_id: CallId
    rows: WorkerRows
    """The part of the batch that it carries."""
    limit_s: float
    """When it is late, on the monotonic clock."""
    outcomes: Outcomes
    """Of the dispatch that it belongs to."""
    sent_s: float = 0.0
    size_class: int = 0
    """Of `call_times`; 0 for a call that could go nowhere else."""
    instead_of: Call | None = None
    """The late or failed call, part of whose rows it carries again."""
    is_overdue: bool = False
    """It was late before, when no more calls could be hedged."""
    abandoned: bool = False
    """Nobody waits for the reply any more."""
    is_probe: bool = False
    """Nobody ever did: it is there to hear of an expert worker."""

    @property
    def num_rows(self) -> int:
        """Token rows, which use as many credits."""
        return len(self.rows.row_ids_R)


@dataclass(frozen=True)
class Outcome:
    """How a call ended: a reply, not looked into yet, or the reason why there is none."""

    call: Call
    response: pb.ForwardResponse | None
    reason: str = ""


@dataclass(frozen=True)
class Unfinished:
    """What compiled code has left to do for a call that it sent."""

    direct: DirectConnection
    """Over which it was sent."""
    unsent: memoryview
    """The rest of its frame."""
    error: int
    """errno of its connection; 0 if there was no error."""
