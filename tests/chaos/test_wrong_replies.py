"""One of three expert workers whose replies are wrong, over direct connections and over gRPC."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from expertmesh.v1 import expert_service_pb2 as pb
from tests.chaos.harness import faults
from tests.chaos.harness.mesh import Mesh, proxied_mesh
from tests.chaos.harness.network import MessageFault
from tests.chaos.harness.replies import WRONG_REPLIES
from tests.chaos.harness.suffering import Traffic, suffer
from tests.chaos.harness.table import Row

pytestmark = [pytest.mark.alone, pytest.mark.chaos, pytest.mark.timeout(1800)]

TIMES = 10


@pytest.fixture(scope="module")
def proxied(tiny_mixtral: Path) -> Iterator[Mesh]:
    """Each expert worker behind a gRPC proxy, without direct connections."""
    with proxied_mesh(tiny_mixtral) as running:
        yield running


@pytest.mark.parametrize("name", WRONG_REPLIES)
def test_over_direct_connections(
    name: str, networked: Mesh, traffic: Traffic, table: list[Row]
) -> None:
    """Whatever one of three answers, no request fails and no token changes."""
    row = Row(f"replies {name}, 1 of 3", times=TIMES)
    table.append(row)
    suffer(networked, faults.wrong_replies([name], direct=True), row, traffic, seed=6)


@pytest.mark.parametrize("name", WRONG_REPLIES)
def test_over_grpc(name: str, proxied: Mesh, traffic: Traffic, table: list[Row]) -> None:
    """The same without direct connections."""
    row = Row(f"replies {name}, 1 of 3, gRPC", times=TIMES)
    table.append(row)
    suffer(proxied, faults.wrong_replies([name], direct=False), row, traffic, seed=7)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "grpc"])
def test_calls_with_a_bit_flipped(
    direct: bool, request: pytest.FixtureRequest, traffic: Traffic, table: list[Row]
) -> None:
    """Whatever comes to one of three, no request fails and no token changes."""
    row = Row(f"calls with a bit flipped, 1 of 3{'' if direct else ', gRPC'}", times=TIMES)
    table.append(row)
    mesh = request.getfixturevalue("networked" if direct else "proxied")
    suffer(mesh, faults.flipped_requests(direct=direct), row, traffic, seed=9)


def _of_another_protocol(snapshot: bytes) -> Sequence[bytes]:
    state = pb.WatchResponse.FromString(snapshot)
    state.protocol_revision += 1
    return (state.SerializeToString(),)


def _of_another_model(snapshot: bytes) -> Sequence[bytes]:
    state = pb.WatchResponse.FromString(snapshot)
    state.model.fingerprint = b"\1" * len(state.model.fingerprint)
    return (state.SerializeToString(),)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param("protocol revision", _of_another_protocol, id="protocol"),
        pytest.param("model", _of_another_model, id="model"),
    ],
)
def test_of_another_kind(
    name: str, change: MessageFault, proxied: Mesh, traffic: Traffic, table: list[Row]
) -> None:
    """A worker that turns out to speak another protocol, or to serve another model, is named and
    left alone, and asked again once it does not.
    """
    row = Row(f"another {name}, 1 of 3", times=TIMES)
    table.append(row)
    suffer(proxied, faults.wrong_states(change), row, traffic, seed=8)
