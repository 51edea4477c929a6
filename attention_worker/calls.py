"""Dispatches to expert workers, their calls, and how those end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from attention_worker.direct_connection import DirectConnection
from attention_worker.outcomes import Outcomes
from expertmesh.model_config import DtypeName
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import WireDtype
from expertmesh.wire_encode import CallId
from expertmesh_kernels.dispatch import Bits, Bools, WorkerRows
from expertmesh_kernels.router import Routing

MOST_TRIES = 3
"""Of rows that were changed on the way, with who alone has their experts."""


Cause = Literal["late", "lost", "damaged", "refused"]
"""Why a call's rows are asked of others; `refused` is whatever the others are not."""


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
    is_served: bool = False
    """Its rows are there, from whomever."""
    cause: Cause = "refused"
    """Once it has failed. What was damaged on the way may go well the next time."""
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
    is_damaged: bool = False
    """The call or its reply was changed on the way."""
    is_lost: bool = False
    """The connection ended while the expert worker had the rows: perhaps it died of them."""

    @property
    def cause(self) -> Cause:
        """If there is no reply, or none that can be used."""
        return "damaged" if self.is_damaged else "lost" if self.is_lost else "refused"


@dataclass(frozen=True)
class Unfinished:
    """What compiled code has left to do for a call that it sent."""

    direct: DirectConnection
    """Over which it was sent."""
    unsent: memoryview
    """The rest of its frame."""
    error: int
    """errno of its connection; 0 if there was no error."""


@dataclass(frozen=True)
class Batch:
    """What is dispatched: one micro-batch of one layer."""

    call_id: CallId
    """Identity of the first try."""
    hidden_TH: Tensor
    routing: Routing
    num_generated_rows: int
    dtype: DtypeName
    """Of the hidden states and of the outputs."""
    wire_dtype: WireDtype
    """How hidden states travel."""
    model_fingerprint: int
    deadline_s: float
    """On the monotonic clock."""
    cautious: bool = False
    """Its rows are suspected of taking expert workers down."""


@dataclass(frozen=True)
class SentRows:
    """A part of a dispatch that compiled code sent, and that is not answered."""

    rows: WorkerRows
    sent_s: float
    limit_s: float
    """When it is late; both on the monotonic clock."""
    size_class: int
    left: Unfinished


@dataclass(frozen=True)
class Progress:
    """What compiled code made of a dispatch before it could not go on."""

    outputs_SH: Bits
    """With what came so far."""
    broken_T: Bools
    """True for rows that are not finite."""
    busy_s: float
    sent: Sequence[SentRows]
