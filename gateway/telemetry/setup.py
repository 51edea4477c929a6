"""Where a gateway's telemetry is read from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from expertmesh.model_config import ModelConfig
from gateway.attention.group import worker_name
from gateway.mesh.gate_totals import RowCounts
from gateway.mesh.membership import Membership
from gateway.mesh.mesh_status import MeshStatus
from gateway.placement.operator import Operator
from gateway.sequence import EngineStats
from gateway.telemetry.latencies import RequestTotals
from gateway.telemetry.sources import ModelExperts, Sources
from gateway.telemetry.telemetry import Telemetry


def make_telemetry(
    config: ModelConfig,
    num_local_holders: int,
    membership: Membership,
    *,
    gate_rows: Callable[[], RowCounts],
    mesh: Callable[[], MeshStatus],
    stats: Callable[[], EngineStats],
    children: Callable[[], Mapping[str, int]],
    requests: RequestTotals,
    placement: Operator,
) -> Telemetry:
    """Not started yet.

    Args:
        config: Which experts there are.
        num_local_holders: Attention workers that hold all experts themselves.
        membership: Knows the expert workers.
        gate_rows: How often each expert was chosen.
        mesh: State of the expert workers.
        stats: Load of the engines.
        children: Name to process id of the attention workers.
        requests: What requests came to.
        placement: Where experts should be.
    """
    experts = ModelExperts.of(config)
    names = (worker_name(index) for index in range(num_local_holders))
    return Telemetry(
        Sources(
            experts=experts,
            local_holders=tuple(names) if experts.layers else (),
            gate_rows=gate_rows,
            expert_map=lambda: membership.expert_map,
            known_workers=membership.known_workers,
            mesh=mesh,
            stats=stats,
            children=children,
            requests=requests,
            placement=placement,
        )
    )
