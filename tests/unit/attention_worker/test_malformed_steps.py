"""Steps with anything in any field: refused by name or computed, and the next step is as ever."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from attention_worker.drafts import Speculation
from attention_worker.model_runner import ModelRunner
from expertmesh.v1 import attention_service_pb2 as pb
from tests.support.runner_driver import RunnerDriver, make_runner

NUM_STEPS = 150
_SIZES = (0, 1, 2, 3, 5, 63, 64, 65, 1000, 2**31 - 1, 2**31, 2**32 - 1)
_VALUES: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.TYPE_UINT32: _SIZES,
    FieldDescriptor.TYPE_UINT64: (*_SIZES, 2**63, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (*_SIZES, 2**63, 2**64 - 1),
    FieldDescriptor.TYPE_FLOAT: (0.0, -1.0, 2.0, 1e38, 1e-45, float("inf"), float("nan")),
    FieldDescriptor.TYPE_BOOL: (True, False),
    FieldDescriptor.TYPE_BYTES: (b"", b"abc", b"\xff" * 4, b"\7\0\0\0" * 3, b"\7\0\0\0" * 600),
    FieldDescriptor.TYPE_STRING: ("", "start: /a/", "{", '{"grammars": []}', "\0"),
}


def _spoil(message: Message, chance: random.Random) -> None:
    """Changes one field, anywhere below."""
    field = chance.choice(message.DESCRIPTOR.fields)
    value = getattr(message, field.name)
    if field.message_type is None:
        new = chance.choice(_VALUES[field.type])
        if field.is_repeated:
            value.extend([new] * chance.choice((1, 1, 2, 100, 5000)))
        else:
            setattr(message, field.name, new)
    elif not field.is_repeated:
        _spoil(value, chance)
    elif len(value) and chance.random() < 0.6:
        _spoil(chance.choice(value), chance)
    elif len(value) and chance.random() < 0.5:
        value.add().CopyFrom(chance.choice(value))
    elif len(value) and chance.random() < 0.5:
        del value[0]
    else:
        _spoil(value.add(), chance)


@pytest.fixture
def runner(text_model: Path) -> Iterator[ModelRunner]:
    """A runner that proposes drafts."""
    made = make_runner(text_model, speculation=Speculation(num_tokens=3, lookup_min=1))
    yield made
    made.grammars.close()


def _output_of_a_good_request(runner: ModelRunner) -> list[int]:
    runner.reset()
    driver = RunnerDriver(runner)
    request = driver.submit([7, 8, 9, 7, 8], 6)
    driver.run()
    return request.output


def test_no_step_harms_the_worker(runner: ModelRunner) -> None:
    """Nothing is an internal error, and nothing of a step outlives the stream it came by."""
    expected = _output_of_a_good_request(runner)
    num_refused = 0
    for number in range(NUM_STEPS):
        chance = random.Random(number)
        runner.reset()
        driver = RunnerDriver(runner)
        for _ in range(3):
            driver.submit([7, 8, 9] * chance.randint(1, 6), 12)
        for _ in range(chance.randint(0, 4)):
            driver.step()
        step = driver.next_request()
        for _ in range(chance.randint(1, 3)):
            _spoil(step, chance)
        response = runner.execute(step)
        if response.status == pb.StepResponse.STATUS_FAILED:
            num_refused += 1
            assert response.message.startswith("malformed step: "), (number, response.message)
        if number % 5 == 0:
            assert _output_of_a_good_request(runner) == expected, number
    assert num_refused > NUM_STEPS / 3
