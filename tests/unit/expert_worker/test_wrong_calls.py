"""Wrong calls over direct connections: each is named as on a stream, and the next is answered."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from expert_worker.server import ExpertServer
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import encode_tensor
from expertmesh.wire_encode import LENGTH
from tests.support.direct_calls import (
    Caller,
    ask,
    connection_to,
    framed,
    read_reply,
    reply_of_python,
    timeless,
)
from tests.support.expert_servers import ROW_CREDITS
from tests.support.expert_wire import HIDDEN, TIMEOUT_S, request

E = pb.ForwardError
ROWS = (1, 2, 7, 40, ROW_CREDITS)


def _changed(**fields: object) -> Callable[[ExpertServer], pb.ForwardRequest]:
    return lambda server: request(server, **fields)


def _hidden(
    change: Callable[[pb.Tensor], object],
) -> Callable[[ExpertServer], pb.ForwardRequest]:
    def make(server: ExpertServer) -> pb.ForwardRequest:
        message = request(server)
        change(message.hidden_states)
        return message

    return make


def _id(change: Callable[[pb.CallId], object]) -> Callable[[ExpertServer], pb.ForwardRequest]:
    def make(server: ExpertServer) -> pb.ForwardRequest:
        message = request(server)
        change(message.id)
        return message

    return make


def _uint32s(*numbers: int) -> bytes:
    return np.array(numbers, np.uint32).tobytes()


def _values(value: float) -> pb.Tensor:
    x_RH = np.ones((2, HIDDEN), np.float32)
    x_RH[1, HIDDEN - 1] = value
    return encode_tensor(x_RH, "float32")


WRONG: dict[str, tuple[Callable[[ExpertServer], pb.ForwardRequest], E.Code]] = {
    "incarnation is 0x1": (_changed(incarnation=1), E.CODE_STALE_INCARNATION),
    "model_fingerprint is 0x2": (_changed(model_fingerprint=2), E.CODE_WRONG_MODEL),
    "id.layer is 3": (_id(lambda i: setattr(i, "layer", 3)), E.CODE_INVALID_ARGUMENT),
    "id.layer is 4294967295": (
        _id(lambda i: setattr(i, "layer", 2**32 - 1)),
        E.CODE_INVALID_ARGUMENT,
    ),
    "row 1 has a NaN": (_hidden(lambda t: t.CopyFrom(_values(np.nan))), E.CODE_NONFINITE_INPUT),
    "row 1 has a NaN or": (_hidden(lambda t: t.CopyFrom(_values(-np.inf))), E.CODE_NONFINITE_INPUT),
    "hidden_states.dtype is 3": (
        _hidden(lambda t: setattr(t, "dtype", pb.DTYPE_FLOAT16)),
        E.CODE_INVALID_ARGUMENT,
    ),
    f"expected [rows, {HIDDEN}]": (
        _hidden(lambda t: t.shape.append(1)),
        E.CODE_INVALID_ARGUMENT,
    ),
    "hidden_states.shape is [2, 47]": (
        _hidden(lambda t: t.shape.__setitem__(1, 47)),
        E.CODE_INVALID_ARGUMENT,
    ),
    "hidden_states has 257 rows": (
        _hidden(lambda t: t.shape.__setitem__(0, ROW_CREDITS + 1)),
        E.CODE_RESOURCE_EXHAUSTED,
    ),
    "expected 192 for shape": (
        _hidden(lambda t: t.shape.__setitem__(0, 1)),
        E.CODE_INVALID_ARGUMENT,
    ),
    "hidden_states.data has 380 bytes": (
        _hidden(lambda t: setattr(t, "data", t.data[4:])),
        E.CODE_INVALID_ARGUMENT,
    ),
    "row_scales has 8 bytes": (
        _hidden(lambda t: setattr(t, "row_scales", bytes(8))),
        E.CODE_INVALID_ARGUMENT,
    ),
    "row_offsets has 8 bytes": (_changed(row_offsets=_uint32s(0, 3)), E.CODE_INVALID_ARGUMENT),
    "row_offsets has 0 bytes": (_changed(row_offsets=b""), E.CODE_INVALID_ARGUMENT),
    "row_offsets starts with 1": (
        _changed(row_offsets=_uint32s(1, 2, 3)),
        E.CODE_INVALID_ARGUMENT,
    ),
    "row_offsets has 3 after 3": (
        _changed(row_offsets=_uint32s(0, 3, 3)),
        E.CODE_INVALID_ARGUMENT,
    ),
    "strictly increasing values": (
        _changed(row_offsets=_uint32s(0, 2**31, 3)),
        E.CODE_INVALID_ARGUMENT,
    ),
    "gives a row 3 experts": (
        _changed(row_offsets=_uint32s(0, 3, 4), expert_ids=_uint32s(0, 1, 2, 1)),
        E.CODE_INVALID_ARGUMENT,
    ),
    "expert_ids has 8 bytes": (_changed(expert_ids=_uint32s(0, 3)), E.CODE_INVALID_ARGUMENT),
    "expert_ids has 8, expected": (
        _changed(expert_ids=_uint32s(0, 8, 1)),
        E.CODE_INVALID_ARGUMENT,
    ),
    "expert_ids has 4294967295": (
        _changed(expert_ids=_uint32s(0, 2**32 - 1, 1)),
        E.CODE_INVALID_ARGUMENT,
    ),
    "expert_ids has 3 after 3": (_changed(expert_ids=_uint32s(3, 3, 1)), E.CODE_INVALID_ARGUMENT),
    "layer 1 expert 5": (_changed(expert_ids=_uint32s(0, 5, 1)), E.CODE_EXPERT_NOT_RESIDENT),
    "layer 1 expert 7": (_changed(expert_ids=_uint32s(0, 7, 1)), E.CODE_EXPERT_NOT_RESIDENT),
    "num_generated_rows is 3": (_changed(num_generated_rows=3), E.CODE_INVALID_ARGUMENT),
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_calls_are_named_and_the_connection_goes_on(server: ExpertServer, text: str) -> None:
    """The answer is that of the reference, which names what is wrong."""
    make, code = WRONG[text]
    good, wrong = request(server).SerializeToString(), make(server).SerializeToString()
    with connection_to(server) as opened:
        for _ in range(2):
            reply = ask(opened, wrong)
            assert (reply.error.code, reply.HasField("outputs")) == (code, False)
            assert text in reply.error.message
            assert ask(opened, good).HasField("outputs")
    load = server.state.load()
    assert (load.calls, load.errors) == (2, 2)


def test_what_is_no_message(server: ExpertServer) -> None:
    """Garbage, a message that is cut anywhere, and none at all are answered."""
    good = request(server).SerializeToString()
    with connection_to(server) as opened:
        for message in (b"", b"\xff\xff\xff", *(good[:end] for end in range(0, len(good), 5))):
            reply = ask(opened, message)
            assert reply.error.code in (
                E.CODE_INVALID_ARGUMENT, E.CODE_STALE_INCARNATION, E.CODE_WRONG_MODEL
            )  # fmt: skip
        assert ask(opened, good).HasField("outputs")
    assert server.state.wait_idle(TIMEOUT_S)


def test_bytes_that_are_changed(server: ExpertServer) -> None:
    """Whatever a call looks like, the reply is that of the reference."""
    rng = np.random.default_rng(0)
    good = request(server, time_left_us=10**9).SerializeToString()
    with connection_to(server) as opened:
        for _ in range(300):
            raw = bytearray(good)
            for at in rng.integers(0, len(raw), rng.integers(1, 3)):
                at = at if rng.random() < 0.3 else at % 120  # more of the head than of rows
                raw[at] = rng.integers(256)
            message = bytes(raw)
            reply = ask(opened, message)
            try:
                time_left_us = pb.ForwardRequest.FromString(message).time_left_us
            except DecodeError:
                assert reply.error.code == E.CODE_INVALID_ARGUMENT
                continue
            if not 0 < time_left_us < 10**7:  # else it depends on the clock
                assert timeless(reply) == reply_of_python(server, message)


def test_what_is_rare_is_answered_by_python(
    server: ExpertServer, unusual: list[pb.ForwardRequest]
) -> None:
    """int8 rows."""
    with connection_to(server) as opened:
        assert ask(opened, Caller(server, 4).message(3, dtype="int8")).HasField("outputs")
        assert [call.hidden_states.dtype for call in unusual] == [pb.DTYPE_INT8]


def test_flipped_bits(server: ExpertServer) -> None:
    """A call that came with another bit is answered with an error; if it is no message any more,
    its connection ends.
    """
    good = framed(request(server, time_left_us=10**9).SerializeToString())
    num_ended = 0
    for bit in range(8 * LENGTH.size, 8 * len(good), 37):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        with connection_to(server) as opened:
            opened.sendall(flipped)
            reply = read_reply(opened)
            assert reply.error.code == E.CODE_DATA_LOSS
            if reply.HasField("id"):
                opened.sendall(good)
                assert read_reply(opened).HasField("outputs")
            else:
                num_ended += 1
                assert opened.recv(1) == b""
    assert 0 < num_ended < 30
    assert server.state.load().pairs == 3 * server.state.load().calls


def test_message_that_is_too_long(server: ExpertServer) -> None:
    """It ends its connection before anything is allocated."""
    with connection_to(server) as opened:
        opened.sendall(LENGTH.pack(2**32 - 1))
        assert opened.recv(10) == b""
