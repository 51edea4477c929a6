"""Experts of this process that are gone for chosen layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attention_worker.experts import ExpertClient, Pending
from expertmesh_kernels.router import Routing


class FlakyExperts:
    """Experts of this process that are gone for chosen layers."""

    def __init__(self, inner: ExpertClient) -> None:
        self.inner = inner
        self.error: Exception | None = None
        self.layer = 1
        self.degraded: list[tuple[int, npt.NDArray[np.int64]]] = []
        self.num_generated_rows: list[int] = []
        self.deadlines_s: list[float] = []

    def begin_step(self, step: int, *, cautious: bool = False) -> None:
        """Passed on."""
        self.inner.begin_step(step, cautious=cautious)

    @property
    def degraded_rows(self) -> Sequence[tuple[int, npt.NDArray[np.int64]]]:
        """Those that are set."""
        return self.degraded

    def dispatch(
        self,
        layer: int,
        h_TH: Tensor,
        routing: Routing,
        num_generated_rows: int,
        deadline_s: float,
    ) -> Pending:
        """Raises the error that is set, else passes on."""
        if self.error is not None and layer == self.layer:
            raise self.error
        self.num_generated_rows.append(num_generated_rows)
        self.deadlines_s.append(deadline_s)
        return self.inner.dispatch(layer, h_TH, routing, num_generated_rows, deadline_s)
