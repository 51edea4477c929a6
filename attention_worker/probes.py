"""Asks expert workers that have long been silent, so that they are used again when they answer."""

from __future__ import annotations

import time

import numpy as np

from attention_worker.calls import Call
from attention_worker.expert_routes import Routes
from attention_worker.expert_stream import ExpertStream
from attention_worker.outcomes import Outcomes, Waiting
from expertmesh.wire import WireDtype
from expertmesh.wire_encode import CallId, CallTarget, RequestFrame
from expertmesh_kernels.dispatch import WorkerRows

TIME_LEFT_S = 5.0
_FIRST_ATTEMPT = 2**16  # no call of a dispatch is asked so often


class Prober:
    """Looks after expert workers that are suspect, between two steps.

    A probe is a call like any other, with one row of zeros for one expert, whose result nobody
    wants. Owner: the model thread.

    Args:
        hidden_size: Of a row.
        dtype: How rows travel.
        model_fingerprint: What expert workers must serve.
    """

    def __init__(self, hidden_size: int, dtype: WireDtype, model_fingerprint: int) -> None:
        self._hidden_size, self._dtype = hidden_size, dtype
        self._fingerprint = model_fingerprint
        self._num_probes = 0
        self._nobody = Outcomes(Waiting())

    def look(self, step_id: CallId, routes: Routes) -> None:
        """Reads what they have sent meanwhile, and sends probes that are due."""
        now_s = time.monotonic()
        for stream in routes.streams:
            if not stream.link.is_open and stream.is_suspect(now_s):
                stream.on_ready()
                if stream.wants_probe(now_s):
                    self._probe(stream, step_id, now_s)

    def _probe(self, stream: ExpertStream, step_id: CallId, now_s: float) -> None:
        resident = stream.worker.resident
        layer = next((layer for layer, experts in resident.items() if experts), None)
        if layer is None:
            return
        self._num_probes += 1
        call_id = step_id._replace(layer=layer, attempt=_FIRST_ATTEMPT + self._num_probes)
        rows = WorkerRows(
            0,
            np.zeros(1, np.int64),
            np.array([0, 1], np.uint32),
            np.array(resident[layer][:1], np.uint32),
            np.zeros(1, np.int64),
            0,
        )
        frame = RequestFrame(
            call_id,
            CallTarget(stream.worker.incarnation, self._fingerprint),
            rows,
            self._hidden_size,
            self._dtype,
            time_left_us=int(TIME_LEFT_S * 1e6),
        )
        frame.rows_RH[:] = 0
        frame.finish()
        limit_s = now_s + TIME_LEFT_S
        call = Call(call_id, rows, limit_s, self._nobody, abandoned=True, is_probe=True)
        stream.submit(call, frame)
