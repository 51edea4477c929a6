"""An expert worker at the other end of a pair of sockets, which answers with zeros.

An exchange is warmed up with it, before any expert worker is known.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from attention_worker.direct_connection import DirectConnection
from attention_worker.expert_routes import LayerTable
from attention_worker.link import Link
from expertmesh.direct import FrameReader, send_parts
from expertmesh.model_config import DtypeName
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import NUMPY_DTYPES, UINT32
from expertmesh.wire_encode import ReplyHead, encode_reply

_MAX_MESSAGE_BYTES = 2**20
_INCARNATION = 1
_ANSWER_TIMEOUT_S = 5.0  # a call is there before it is answered


class Loopback:
    """A stream whose expert worker is `answer`.

    Args:
        ours: A connected socket that does not block.
        theirs: Its peer.
        credits: Row credits.
    """

    def __init__(self, ours: socket.socket, theirs: socket.socket, credits: int = 1) -> None:
        self.link = Link(_INCARNATION, credits)
        self.is_up = True
        self._direct = DirectConnection(ours, _MAX_MESSAGE_BYTES)
        self._theirs = theirs
        self._reader = FrameReader(theirs, _MAX_MESSAGE_BYTES)

    def open_exchange(self) -> DirectConnection | None:
        """See Partner."""
        if not self.is_up:
            return None
        self.link.open(self._direct)
        return self._direct

    def answer(self, hidden_size: int, dtype: DtypeName) -> None:
        """Takes the call that has come, and sends zeros."""
        (message,) = self._reader.receive()
        request = pb.ForwardRequest.FromString(message)
        num_pairs = len(request.expert_ids) // UINT32.itemsize
        head = ReplyHead(request.id.SerializeToString(), _INCARNATION, 0, 0, row_credits=1)
        outputs_NH = np.zeros((num_pairs, hidden_size), NUMPY_DTYPES[dtype])
        send_parts(self._theirs, encode_reply(head, outputs_NH, dtype))


class LoopbackRoutes:
    """All experts of one layer there.

    Args:
        stream: To it.
        num_experts: Of the layer.
    """

    def __init__(self, stream: Loopback, num_experts: int) -> None:
        self.streams: Sequence[Loopback] = (stream,)
        worker_of_expert_E: npt.NDArray[np.int32] = np.zeros(num_experts, np.int32)
        copies_ER = worker_of_expert_E.reshape(num_experts, 1)
        table = LayerTable(True, worker_of_expert_E, copies_ER, np.ones(1, np.int64))
        self.tables: Mapping[int, LayerTable] = {0: table}


@contextmanager
def loopback() -> Iterator[Loopback]:
    """One that ends with the context."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.settimeout(_ANSWER_TIMEOUT_S)
        yield Loopback(ours, theirs)
