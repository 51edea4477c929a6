"""AttentionService over a real Unix socket: streams, their owners and their ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from attention_worker.membership import expert_map_from_proto
from attention_worker.server import AttentionServer, AttentionServicer
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import PortError
from expertmesh.placement import ExpertMap
from expertmesh.v1 import attention_service_pb2 as pb
from expertmesh.v1 import attention_service_pb2_grpc as pb_grpc
from expertmesh.v1 import expert_service_pb2
from tests.support.runner_driver import RunnerDriver, make_runner
from tests.support.tiny_checkpoints import MIXTRAL

if TYPE_CHECKING:
    from tests.conftest import Models

DEADLINE_S = 20.0


class Requests:
    """An open request stream that a test feeds."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[object] = queue.SimpleQueue()

    def send(self, message: object) -> None:
        """Sends a message."""
        self._queue.put(message)

    def close(self) -> None:
        """Half-closes the stream."""
        self._queue.put(None)

    def __iter__(self) -> Iterator[object]:
        """What was sent, until closed."""
        return iter(self._queue.get, None)


class MapUser:
    """Keeps maps; has one observation to tell."""

    def __init__(self) -> None:
        self.maps: list[tuple[ExpertMap, int]] = []
        self.changed = threading.Condition()
        self._news = [pb.ExpertObservation(worker_id="a", calls=3)]

    def update_map(self, expert_map: ExpertMap, gateway: int = 0) -> None:
        """Keeps the map."""
        with self.changed:
            self.maps.append((expert_map, gateway))
            self.changed.notify_all()

    def observations(self) -> Sequence[pb.ExpertObservation]:
        """The observation, once."""
        news, self._news = self._news, []
        return news

    def take_dropped(self) -> int:
        """Nothing was left out."""
        return 0


class Service:
    """A server of a tiny Mixtral, and a channel to it."""

    def __init__(self, model_dir: Path, socket_path: Path) -> None:
        self.map_user = MapUser()
        self.runner = make_runner(model_dir, num_slots=4)
        servicer = AttentionServicer(
            pb.DescribeResponse(max_model_len=256), self.runner, self.map_user
        )
        self.server = AttentionServer(servicer, str(socket_path))
        self.server.start()
        self.channel = grpc.insecure_channel(f"unix:{socket_path}")
        self.stub = pb_grpc.AttentionServiceStub(self.channel)


@pytest.fixture
def service(models: Models, tmp_path: Path) -> Iterator[Service]:
    """A running service; everything ends with the test."""
    service = Service(models.tiny(MIXTRAL), tmp_path / "attention.sock")
    yield service
    service.channel.close()
    assert service.server.stop(DEADLINE_S)


def _first_step(service: Service) -> pb.RunRequest:
    """A step that opens slots and blocks from the start of the pool."""
    driver = RunnerDriver(service.runner)
    driver.submit([5, 6, 7], 4)
    driver.submit([8, 9], 4)
    return pb.RunRequest(step=driver.next_request())


def test_describe_answers_with_the_description(service: Service) -> None:
    """What the server was given, unchanged."""
    response = service.stub.Describe(pb.DescribeRequest(), timeout=DEADLINE_S)
    assert response == pb.DescribeResponse(max_model_len=256)


def test_run_answers_steps_in_order_and_a_new_stream_starts_afresh(service: Service) -> None:
    """The same first step works on each new stream: all slots are free again."""
    step = _first_step(service)
    sampled = []
    for _ in range(2):
        requests = Requests()
        responses = service.stub.Run(iter(requests), timeout=DEADLINE_S)
        requests.send(step)
        first = next(responses).step
        assert first.status == pb.StepResponse.STATUS_DONE, first.message
        requests.send(pb.RunRequest(step=pb.StepRequest(step=5)))
        assert next(responses).step.step == 5
        requests.close()
        assert list(responses) == []
        sampled.append([token.token_id for token in first.sampled])
    assert sampled[0] == sampled[1]


def test_second_run_stream_is_refused_while_the_first_lives(service: Service) -> None:
    """The first one goes on."""
    requests = Requests()
    responses = service.stub.Run(iter(requests), timeout=DEADLINE_S)
    requests.send(pb.RunRequest(step=pb.StepRequest(step=1)))
    next(responses)
    with pytest.raises(grpc.RpcError) as refused:
        next(service.stub.Run(iter([]), timeout=DEADLINE_S))
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    requests.send(pb.RunRequest(step=pb.StepRequest(step=2)))
    assert next(responses).step.step == 2
    requests.close()


def test_cancelled_run_stream_makes_room(service: Service) -> None:
    """A gateway that vanished does not block its successor."""
    requests = Requests()
    responses = service.stub.Run(iter(requests), timeout=DEADLINE_S)
    requests.send(_first_step(service))
    next(responses)
    responses.cancel()
    requests.close()
    assert service.server.wait_idle(DEADLINE_S)
    again = service.stub.Run(iter([_first_step(service)]), timeout=DEADLINE_S)
    assert next(again).step.status == pb.StepResponse.STATUS_DONE


def _update(epoch: int, expert: int = 1) -> pb.MembershipRequest:
    layers = [expert_service_pb2.LayerExperts(layer=2, resident=[expert, 0])]
    worker = pb.ExpertMapWorker(
        worker_id="a", address="h:1", incarnation=9, layers=layers, row_credits=64
    )
    return pb.MembershipRequest(
        expert_map=pb.ExpertMapUpdate(epoch=epoch, gateway=77, workers=[worker])
    )


def test_membership_folds_maps_and_yields_observations(service: Service) -> None:
    """Older maps are dropped; an observation comes with the epoch in use."""
    requests = Requests()
    responses = service.stub.Membership(iter(requests), timeout=DEADLINE_S)
    for epoch in (3, 2, 4):
        requests.send(_update(epoch))
    user = service.map_user
    with user.changed:
        assert user.changed.wait_for(lambda: len(user.maps) == 2, DEADLINE_S)
    assert [(expert_map.epoch, gateway) for expert_map, gateway in user.maps] == [(3, 77), (4, 77)]
    response = next(responses)
    assert response.epoch == 4
    assert response.observations[0].worker_id == "a"
    requests.close()
    assert list(responses) == []


def test_impossible_map_is_refused(service: Service) -> None:
    """The message names expert worker, layer and expert."""
    responses = service.stub.Membership(iter([_update(1, expert=8)]), timeout=DEADLINE_S)
    with pytest.raises(grpc.RpcError) as refused:
        list(responses)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == "a: layer 2 expert 8, expected below 8"


def test_map_of_an_update(models: Models) -> None:
    """Experts are ascending; credits and incarnation are kept."""
    config = Checkpoint.open(models.tiny(MIXTRAL)).config
    expert_map = expert_map_from_proto(_update(6).expert_map, config)
    assert expert_map.epoch == 6
    assert expert_map.workers[0].resident == {2: (0, 1)}
    assert (expert_map.workers[0].incarnation, expert_map.workers[0].row_credits) == (9, 64)


def test_stop_ends_idle_streams_at_once(models: Models, tmp_path: Path) -> None:
    """Open streams without work do not hold up the end."""
    service = Service(models.tiny(MIXTRAL), tmp_path / "attention.sock")
    requests, members = Requests(), Requests()
    running = service.stub.Run(iter(requests), timeout=DEADLINE_S)
    requests.send(pb.RunRequest(step=pb.StepRequest(step=1)))
    next(running)
    watching = service.stub.Membership(iter(members), timeout=DEADLINE_S)
    members.send(_update(1))
    next(watching)
    assert service.server.stop(DEADLINE_S)
    with pytest.raises(grpc.RpcError):
        next(running)
    requests.close()
    members.close()
    service.channel.close()


def test_socket_that_cannot_be_made_is_named(models: Models, tmp_path: Path) -> None:
    """The message has the path."""
    path = tmp_path / "missing" / "attention.sock"
    with pytest.raises(PortError, match=str(path)):
        Service(models.tiny(MIXTRAL), path)
