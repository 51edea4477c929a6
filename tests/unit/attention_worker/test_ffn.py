"""What an MoE layer does while its rows are with the experts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_worker.experts import Pending
from attention_worker.layers.ffn import ExpertCalls, MoeFfn, PlainSharedExpert, WeighedSharedExpert
from expertmesh.errors import ExpertUnavailableError
from expertmesh.model_config import SILU, GateConfig
from expertmesh_kernels.grouped_mlp import pack_expert
from expertmesh_kernels.linear import pack_linear
from expertmesh_kernels.router import Gate, Routing

ROWS = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
GATE = GateConfig(num_experts=4, top_k=2)


class Events:
    """An expert client and a shared expert that note what happens, in order.

    Args:
        answer: What the experts answer; None for a failure.
    """

    def __init__(self, answer: Tensor | None) -> None:
        self.seen: list[str] = []
        self._answer = answer
        self.busy_s = 0.0

    degraded_rows = ()

    def begin_step(self, step: int, *, cautious: bool = False) -> None:
        """Nothing to pin."""

    def dispatch(
        self, layer: int, h_TH: Tensor, routing: Routing, num_generated_rows: int, deadline_s: float
    ) -> Pending:
        """Rows leave."""
        self.seen.append("rows leave")
        return self

    def result(self) -> Tensor:
        """Rows are waited for."""
        self.seen.append("wait")
        if self._answer is None:
            raise ExpertUnavailableError([(0, 1)])
        return self._answer

    def __call__(self, h_TH: Tensor) -> Tensor:
        """The shared expert computes."""
        self.seen.append("shared expert")
        return 2 * h_TH


def _layer(*shared: Events) -> MoeFfn:
    gate = pack_linear(torch.randn(4, 8, generator=torch.Generator().manual_seed(2)))
    return MoeFfn(layer=0, gate=Gate(gate, GATE), shared=shared)


def test_shared_experts_compute_while_rows_travel() -> None:
    """First the rows leave, then shared experts compute, then the routed experts are waited for;
    the sum of all is the output."""
    events = Events(answer=torch.ones(5, 8))
    out_TH = _layer(events, events).begin(ROWS, ExpertCalls(events, timeout_s=1.0)).result()
    assert events.seen == ["rows leave", "shared expert", "shared expert", "wait"]
    torch.testing.assert_close(out_TH, 1 + 4 * ROWS)


def test_without_shared_experts_the_output_is_that_of_the_routed_ones() -> None:
    """Nothing is added, and nothing copied."""
    answer = torch.ones(5, 8)
    events = Events(answer)
    begun = _layer().begin(ROWS, ExpertCalls(events, timeout_s=1.0))
    assert begun.result() is answer
    assert events.seen == ["rows leave", "wait"]


def test_time_is_counted_as_waiting_even_if_experts_fail() -> None:
    """The wait ends with the experts' error."""
    events = Events(answer=None)
    calls = ExpertCalls(events, timeout_s=1.0)
    with pytest.raises(ExpertUnavailableError):
        _layer(events).begin(ROWS, calls).result()
    assert calls.wait_s > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weighed_shared_expert_gives_a_row_the_same_bits_in_any_batch(
    dtype: torch.dtype,
) -> None:
    """sigmoid(gate(x)) * expert(x), whatever other rows there are."""
    generator = torch.Generator().manual_seed(3)

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    expert = PlainSharedExpert(pack_expert(weight(12, 8), weight(8, 6)), SILU)
    gate_1H = weight(1, 8)
    shared = WeighedSharedExpert(expert, pack_linear(gate_1H.float()))
    x_TH = weight(37, 8)
    together_TH = shared(x_TH)
    assert together_TH.dtype == dtype
    expected_TH = torch.sigmoid(x_TH.float() @ gate_1H.float().T) * expert(x_TH).float()
    torch.testing.assert_close(together_TH, expected_TH.to(dtype))
    for size in (1, 2, 3, 5, 8, 17):
        for start in np.arange(0, 37 - size, 7).tolist():
            part = slice(start, start + size)
            assert torch.equal(shared(x_TH[part]), together_TH[part])
