"""The wire codec: round trips, and every way in which a message can be wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertmesh import wire
from expertmesh.errors import WireError
from expertmesh.model_config import DtypeName, GateConfig
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire_encode import (
    CallId,
    CallTarget,
    RequestFrame,
)
from expertmesh.wire_forward import ForwardLimits, decode_forward_request, view_outputs

E = pb.ForwardError
LIMITS = ForwardLimits(
    incarnation=0xABC,
    model_fingerprint=0xDEF,
    dtype="float32",
    hidden_size=4,
    num_layers=3,
    gates={1: GateConfig(num_experts=8, top_k=2)},
    max_rows=16,
)


@dataclass(frozen=True)
class Rows:
    """Routing part of a call."""

    row_offsets: npt.NDArray[np.uint32]
    expert_ids_N: npt.NDArray[np.uint32]
    num_generated_rows: int = 0


def rows(offsets: list[int], experts: list[int], generated: int = 0) -> Rows:
    return Rows(np.array(offsets, np.uint32), np.array(experts, np.uint32), generated)


def hidden(num_rows: int, dtype: DtypeName = "float32") -> wire.RawArray:
    values = np.arange(num_rows * 4, dtype=np.float32).reshape(num_rows, 4)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(wire.NUMPY_DTYPES[dtype])


def request() -> pb.ForwardRequest:
    """A valid call: 3 rows, 5 pairs, the first 2 rows of generated tokens."""
    frame = RequestFrame(
        CallId(gateway=7, epoch=1, step=2, layer=1, micro_batch=0),
        CallTarget(LIMITS.incarnation, LIMITS.model_fingerprint),
        rows([0, 2, 3, 5], [1, 6, 0, 2, 7], generated=2),
        4,
        "float32",
        time_left_us=5_000,
    )
    frame.rows_RH[:] = hidden(3)
    frame.finish()
    return pb.ForwardRequest.FromString(frame.message)


def error_of(message: pb.ForwardRequest, limits: ForwardLimits = LIMITS) -> WireError:
    with pytest.raises(WireError) as caught:
        decode_forward_request(message, limits)
    return caught.value


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tensor_round_trip(dtype: DtypeName) -> None:
    """A tensor comes back bit by bit, as a read-only view of the message."""
    sent = hidden(3, dtype)
    message = wire.encode_tensor(sent, dtype)
    got, got_dtype = wire.decode_tensor(pb.Tensor.FromString(message.SerializeToString()), "x")
    assert (dtype, sent.tobytes(), (3, 4)) == (got_dtype, got.tobytes(), got.shape)
    assert not got.flags.writeable


def test_call_round_trip() -> None:
    """A call comes back with rows, routing, token classes and time."""
    call = decode_forward_request(
        pb.ForwardRequest.FromString(request().SerializeToString()), LIMITS
    )
    assert (
        call.layer,
        call.num_rows,
        call.num_pairs,
        call.num_generated_rows,
        call.time_left_us,
    ) == (1, 3, 5, 2, 5_000)
    np.testing.assert_array_equal(hidden(3), call.hidden_RH)
    np.testing.assert_array_equal([0, 0, 1, 2, 2], call.row_of_pair_N())
    np.testing.assert_array_equal([1, 6, 0, 2, 7], call.expert_ids_N)


def test_call_without_rows_is_valid() -> None:
    """Zero rows are answered with zero outputs, not refused."""
    message = request()
    message.hidden_states.CopyFrom(wire.encode_tensor(hidden(0), "float32"))
    message.row_offsets, message.expert_ids = bytes(4), b""
    message.num_generated_rows = 0
    assert decode_forward_request(message, LIMITS).num_pairs == 0


def u32(*values: int) -> bytes:
    return np.array(values, np.uint32).tobytes()


def set_tensor(**fields: object) -> Callable[[pb.ForwardRequest], None]:
    def change(message: pb.ForwardRequest) -> None:
        for name, value in fields.items():
            if name == "shape":
                del message.hidden_states.shape[:]
                message.hidden_states.shape.extend(value)  # type: ignore[arg-type]
            else:
                setattr(message.hidden_states, name, value)

    return change


def set_fields(**fields: object) -> Callable[[pb.ForwardRequest], None]:
    def change(message: pb.ForwardRequest) -> None:
        for name, value in fields.items():
            setattr(message, name, value)

    return change


def set_layer(layer: int) -> Callable[[pb.ForwardRequest], None]:
    return lambda message: setattr(message.id, "layer", layer)


def set_element(value: float) -> Callable[[pb.ForwardRequest], None]:
    values = hidden(3)
    values[1, 2] = value
    return set_tensor(data=values.tobytes())


BAD_CALLS: dict[str, tuple[Callable[[pb.ForwardRequest], None], int, str]] = {
    "no id": (lambda m: m.ClearField("id"), E.CODE_INVALID_ARGUMENT, "id is missing"),
    "layer without experts": (set_layer(0), E.CODE_INVALID_ARGUMENT, "id.layer is 0"),
    "layer out of range": (set_layer(2**32 - 1), E.CODE_INVALID_ARGUMENT, "id.layer is 4294967295"),
    "stale incarnation": (
        set_fields(incarnation=1),
        E.CODE_STALE_INCARNATION,
        "incarnation is 0x1",
    ),
    "other model": (
        set_fields(model_fingerprint=2),
        E.CODE_WRONG_MODEL,
        "model_fingerprint is 0x2",
    ),
    "no tensor": (lambda m: m.ClearField("hidden_states"), E.CODE_INVALID_ARGUMENT, "shape is []"),
    "rank 1": (set_tensor(shape=[12]), E.CODE_INVALID_ARGUMENT, "shape is [12]"),
    "rank 3": (set_tensor(shape=[3, 4, 1]), E.CODE_INVALID_ARGUMENT, "shape is [3, 4, 1]"),
    "hidden size": (set_tensor(shape=[3, 5]), E.CODE_INVALID_ARGUMENT, "expected [rows, 4]"),
    "many rows": (set_tensor(shape=[17, 4]), E.CODE_RESOURCE_EXHAUSTED, "17 rows"),
    "absurd rows": (set_tensor(shape=[2**32 - 1, 4]), E.CODE_RESOURCE_EXHAUSTED, "4294967295 rows"),
    "dtype": (set_tensor(dtype=pb.DTYPE_FLOAT16), E.CODE_INVALID_ARGUMENT, "dtype is 3"),
    "int8 without scales": (
        set_tensor(dtype=pb.DTYPE_INT8, data=bytes(12)),
        E.CODE_INVALID_ARGUMENT,
        "row_scales has 0 bytes, expected 12 with int8",
    ),
    "unknown dtype": (set_tensor(dtype=99), E.CODE_INVALID_ARGUMENT, "dtype is 99"),
    "short data": (set_tensor(data=bytes(47)), E.CODE_INVALID_ARGUMENT, "47 bytes, expected 48"),
    "long data": (set_tensor(data=bytes(49)), E.CODE_INVALID_ARGUMENT, "49 bytes, expected 48"),
    "scales": (set_tensor(row_scales=bytes(12)), E.CODE_INVALID_ARGUMENT, "row_scales has 12"),
    "short offsets": (
        set_fields(row_offsets=u32(0, 2, 5)),
        E.CODE_INVALID_ARGUMENT,
        "row_offsets has 12 bytes, expected 16",
    ),
    "truncated offsets": (
        set_fields(row_offsets=u32(0, 2, 3, 5)[:-1]),
        E.CODE_INVALID_ARGUMENT,
        "row_offsets has 15 bytes",
    ),
    "no offsets": (set_fields(row_offsets=b""), E.CODE_INVALID_ARGUMENT, "row_offsets has 0 bytes"),
    "first offset": (
        set_fields(row_offsets=u32(1, 2, 3, 5)),
        E.CODE_INVALID_ARGUMENT,
        "row_offsets starts with 1",
    ),
    "falling offsets": (
        set_fields(row_offsets=u32(0, 3, 2, 5)),
        E.CODE_INVALID_ARGUMENT,
        "row_offsets has 2 after 3 at row 1",
    ),
    "row without experts": (
        set_fields(row_offsets=u32(0, 2, 2, 5)),
        E.CODE_INVALID_ARGUMENT,
        "row_offsets has 2 after 2 at row 1",
    ),
    "last offset": (
        set_fields(row_offsets=u32(0, 2, 3, 2**32 - 1)),
        E.CODE_INVALID_ARGUMENT,
        "expert_ids has 20 bytes",
    ),
    "truncated expert ids": (
        set_fields(expert_ids=u32(1, 6, 0, 2, 7)[:-2]),
        E.CODE_INVALID_ARGUMENT,
        "expert_ids has 18 bytes, expected 20",
    ),
    "expert out of range": (
        set_fields(expert_ids=u32(1, 8, 0, 2, 7)),
        E.CODE_INVALID_ARGUMENT,
        "expert_ids has 8, expected ids below 8",
    ),
    "largest expert id": (
        set_fields(expert_ids=u32(1, 2**32 - 1, 0, 2, 7)),
        E.CODE_INVALID_ARGUMENT,
        "expert_ids has 4294967295",
    ),
    "expert twice": (
        set_fields(expert_ids=u32(6, 6, 0, 2, 7)),
        E.CODE_INVALID_ARGUMENT,
        "expert_ids has 6 after 6 at pair 0",
    ),
    "experts falling": (
        set_fields(expert_ids=u32(1, 6, 0, 7, 2)),
        E.CODE_INVALID_ARGUMENT,
        "expert_ids has 2 after 7 at pair 3",
    ),
    "more than top-k experts": (
        set_fields(row_offsets=u32(0, 1, 2, 5), expert_ids=u32(1, 6, 0, 2, 7)),
        E.CODE_INVALID_ARGUMENT,
        "a row 3 experts, expected at most 2",
    ),
    "generated rows": (
        set_fields(num_generated_rows=4),
        E.CODE_INVALID_ARGUMENT,
        "num_generated_rows is 4",
    ),
    "NaN": (set_element(math.nan), E.CODE_NONFINITE_INPUT, "row 1"),
    "infinity": (set_element(-math.inf), E.CODE_NONFINITE_INPUT, "row 1"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call_is_named(name: str) -> None:
    """Each wrong field gets its code and a message with field, value and expectation."""
    change, code, text = BAD_CALLS[name]
    message = request()
    change(message)
    error = error_of(message)
    assert code == error.code
    assert text in str(error)


def test_empty_message_is_refused() -> None:
    """An empty message parses, so that missing fields must be found by hand."""
    assert "id is missing" in str(error_of(pb.ForwardRequest()))


@given(st.binary(max_size=200))
def test_random_bytes_are_answered(data: bytes) -> None:
    """Whatever bytes come in, the outcome is a message that is checked, or a reason."""
    received = wire.receiver(pb.ForwardRequest)(data)
    if received.message is None:
        assert "are not a ForwardRequest" in received.error
        return
    error_of(received.message)


def test_truncated_message_is_answered() -> None:
    """A message cut at any place parses to a reason or fails a check; nothing is raised else."""
    whole = request().SerializeToString()
    for length in range(len(whole)):
        received = wire.receiver(pb.ForwardRequest)(whole[:length])
        if received.message is not None:
            try:
                decode_forward_request(received.message, LIMITS)
            except WireError:
                continue
            # Only fields whose absence is valid may be missing.
            assert received.message.row_offsets == request().row_offsets


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_finite_checks(dtype: DtypeName) -> None:
    """NaN and infinity of both signs are found; the largest finite values and -0.0 are not."""
    bits = np.uint32 if dtype == "float32" else np.uint16
    shift = 0 if dtype == "float32" else (16 if dtype == "bfloat16" else None)

    def element(value: float) -> int:
        if shift is None:
            return int(np.array(value, np.float16).view(np.uint16))
        return int(np.array(value, np.float32).view(np.uint32)) >> shift

    for value, finite in ((math.nan, False), (math.inf, False), (-math.inf, False), (-0.0, True)):
        array = np.zeros((2, 3), bits)
        array[1, 2] = element(value)
        raw = array.view(wire.NUMPY_DTYPES[dtype])
        assert finite == wire.all_finite(raw, dtype)
        assert [True, finite] == wire.finite_rows(raw, dtype).tolist()
    largest = np.full((1, 1), element(math.inf) - 1, bits).view(wire.NUMPY_DTYPES[dtype])
    assert wire.all_finite(largest, dtype)
    assert wire.all_finite(largest[:0], dtype)


def response(outputs: wire.RawArray | None) -> pb.ForwardResponse:
    return pb.ForwardResponse(
        outputs=None if outputs is None else wire.encode_tensor(outputs, "float32")
    )


def test_outputs_round_trip() -> None:
    """Outputs come back bit by bit."""
    got = view_outputs(response(hidden(5)), (5, 4), "float32")
    np.testing.assert_array_equal(hidden(5), got)


def test_bad_outputs_are_named() -> None:
    """Missing, misshapen and mistyped outputs are refused."""
    own = pb.ForwardResponse(
        error=E(code=E.CODE_EXPERT_NOT_RESIDENT, message="gone", expert_ids=[3])
    )
    cases = [
        (pb.ForwardResponse(), E.CODE_INVALID_ARGUMENT, "result is missing"),
        (response(hidden(4)), E.CODE_INVALID_ARGUMENT, "[4, 4] of float32, expected [5, 4]"),
        (own, E.CODE_EXPERT_NOT_RESIDENT, "gone"),
    ]
    for message, code, text in cases:
        with pytest.raises(WireError) as caught:
            view_outputs(message, (5, 4), "float32")
        assert code == caught.value.code
        assert text in str(caught.value)
    with pytest.raises(WireError, match="of float32, expected"):
        view_outputs(response(hidden(5)), (5, 4), "float16")


def test_identities() -> None:
    """Incarnations differ and are never 0; a fingerprint travels as its first 8 bytes."""
    drawn = {wire.incarnation() for _ in range(100)}
    assert len(drawn) == 100
    assert 0 not in drawn
    assert wire.fingerprint64(bytes(range(32))) == 0x0706050403020100


def test_limits_are_immutable() -> None:
    """Another life of an expert worker has other limits; the old ones keep refusing."""
    assert error_of(request(), replace(LIMITS, incarnation=5)).code == E.CODE_STALE_INCARNATION
