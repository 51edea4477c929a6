"""Use of experts in a window: shares, evenness, who is idle, who is most used, who holds them."""

from __future__ import annotations

import numpy as np
import pytest

from expertmesh.placement import ExpertMap
from expertmesh.v1 import attention_service_pb2 as pb
from gateway.mesh.gate_totals import GateTotals
from gateway.telemetry.expert_use import ExpertUse, copies_LE, holders
from gateway.telemetry.sources import ModelExperts, Sources
from gateway.telemetry.telemetry import Telemetry
from tests.support.seen_mesh import SeenMesh


def _use(seen: SeenMesh, telemetry: Telemetry) -> ExpertUse:
    return ExpertUse.of(telemetry.sources, telemetry.window(None))


def test_shares_and_evenness() -> None:
    """Layer 0 has one expert that takes half and one that nobody chose; layer 1 is even."""
    seen = SeenMesh()
    seen.rows_LE[:] = 1000  # before the window
    telemetry = Telemetry(seen.sources())
    seen.rows_LE += [[40, 20, 0, 20], [10, 10, 10, 10]]
    use = _use(seen, telemetry)
    assert use.num_rows_L.tolist() == [40, 20]
    assert use.share_LE[0].tolist() == [0.5, 0.25, 0, 0.25]
    assert use.utilisation_LE.tolist() == [[2, 1, 0, 1], [1, 1, 1, 1]]
    assert use.expert_imbalance_L.tolist() == [2, 1]
    assert use.dead_L.tolist() == [1, 0]
    assert use.entropy_L.tolist() == pytest.approx([1.5 / 2, 1.0])
    assert use.hottest_LN(3).tolist() == [[0, 1, 3], [0, 1, 2]]


def test_without_load_nothing_is_uneven() -> None:
    """No expert is dead that could not have been chosen."""
    seen = SeenMesh()
    use = _use(seen, Telemetry(seen.sources()))
    assert use.expert_imbalance_L.tolist() == use.worker_imbalance_L.tolist() == [1, 1]
    assert (use.dead_L.tolist(), use.entropy_L.tolist()) == ([0, 0], [1, 1])
    assert not use.share_LE.any()


def test_pairs_of_expert_workers() -> None:
    """What they computed in the window; a count that fell, as an expert was unloaded, is none."""
    seen = SeenMesh()
    seen.pairs = {"w0": {1: 100, 3: 100}, "w1": {1: 100}}
    telemetry = Telemetry(seen.sources())
    seen.pairs = {"w0": {1: 130, 3: 40}, "w1": {1: 110, 3: 6}}
    use = _use(seen, telemetry)
    assert use.workers == ("w0", "w1")
    assert use.pairs_LW.tolist() == [[30, 10], [0, 6]]
    assert use.worker_imbalance_L.tolist() == [1.5, 2]


def test_who_holds_experts() -> None:
    """Expert 2 has two copies."""
    names, held_LER = holders(SeenMesh().sources())
    assert names == ("w0", "w1")
    assert [sorted(held) for held in held_LER[1].tolist()] == [[-1, 0], [-1, 0], [0, 1], [-1, 1]]
    assert copies_LE(SeenMesh().sources()).tolist() == [[1, 1, 2, 1]] * 2


def test_nobody_holds_anything() -> None:
    """Before the first expert worker answers."""
    seen = SeenMesh()
    seen.expert_map = ExpertMap(0, (1, 3), 4)
    use = _use(seen, Telemetry(seen.sources()))
    assert copies_LE(seen.sources()).tolist() == [[0] * 4] * 2
    assert (use.workers, use.pairs_LW.shape) == ((), (2, 0))
    assert use.worker_imbalance_L.tolist() == [1, 1]


def test_attention_workers_hold_experts_themselves() -> None:
    """Each of them all."""
    local = Sources(ModelExperts((0,), 3, 1), local_holders=("attention-worker-0", "b"))
    assert holders(local)[0] == ("attention-worker-0", "b")
    assert copies_LE(local).tolist() == [[2, 2, 2]]


def test_a_dense_model_has_no_experts() -> None:
    """Empty arrays, no error."""
    use = ExpertUse.of(Sources(), Telemetry().window(10.0))
    assert use.share_LE.shape == copies_LE(Sources()).shape == (0, 0)
    assert use.hottest_LN(3).shape == (0, 0)


def test_counts_of_attention_workers_add_up() -> None:
    """Whoever they come from; what does not fit is left out."""
    totals = GateTotals(2, 3)
    counts = np.arange(6, dtype="<u4")
    for _ in range(2):
        totals.add(pb.MembershipResponse(gate_rows=counts.tobytes()))
    totals.add(pb.MembershipResponse())
    totals.add(pb.MembershipResponse(gate_rows=counts[:4].tobytes()))
    found = totals.snapshot()
    assert found.tolist() == [[0, 2, 4], [6, 8, 10]]
    found[0, 0] = 99
    assert totals.snapshot()[0, 0] == 0, "it is a copy"
