"""Hidden states in fewer bytes: how far results are off, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attention_worker.experts import RemoteExperts
from attention_worker.worker import _wire_dtype
from expertmesh.attention_settings import AttentionWorkerSettings
from expertmesh.checkpoint import Checkpoint
from expertmesh.errors import SettingsError
from expertmesh.model_config import DtypeName
from expertmesh.settings import MeshSettings
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.wire import WireDtype
from tests.conftest import Models
from tests.support.expert_servers import entry_of, expert_server, loaded_store, map_of
from tests.support.expert_wire import RawStream, channel, request
from tests.support.expert_work import HIDDEN, local, work
from tests.support.tiny_checkpoints import MIXTRAL

E = pb.ForwardError


@pytest.fixture(scope="module")
def checkpoint(models: Models) -> Checkpoint:
    """A tiny Mixtral: 3 layers, 8 experts, top-2."""
    return Checkpoint.open(models.tiny(MIXTRAL))


@pytest.mark.parametrize(
    ("dtype", "wire_dtype", "bound"),
    [
        ("float32", "int8", 0.03),
        ("float32", "bfloat16", 0.01),
        ("bfloat16", "int8", 0.03),
        ("float16", "int8", 0.03),
        ("bfloat16", "bfloat16", 0.0),
    ],
)
def test_results_are_near_those_of_full_rows(
    checkpoint: Checkpoint, dtype: DtypeName, wire_dtype: WireDtype, bound: float
) -> None:
    """Relative to the largest output; a row that is not finite still harms itself only."""
    todo = work(40, dtype)
    expected = todo.run(local(checkpoint, dtype)).float()
    todo.h_TH[3, 1] = torch.nan
    with expert_server(loaded_store(checkpoint, dtype)) as server:
        experts = RemoteExperts(checkpoint.config, checkpoint.fingerprint, dtype, wire_dtype)
        try:
            experts.update_map(map_of(checkpoint, [entry_of(server.state, server.port)]))
            experts.begin_step(1)
            actual = todo.run(experts).float()
            (seen,) = experts.observations()
        finally:
            experts.close()
    assert actual[3].isnan().all()
    others = [row for row in range(40) if row != 3]
    error = (actual[others] - expected[others]).abs().max() / expected.abs().max()
    assert error <= bound
    itemsize = {"int8": 1, "bfloat16": 2}[wire_dtype]
    assert seen.bytes_out == 40 * HIDDEN * itemsize


def _int8(scales: bytes, data: bytes = bytes(2 * HIDDEN), rows: int = 2) -> pb.Tensor:
    return pb.Tensor(dtype=pb.DTYPE_INT8, shape=[rows, HIDDEN], data=data, row_scales=scales)


def test_bad_int8_rows_are_answered(checkpoint: Checkpoint) -> None:
    """Scales that are missing, too many, NaN, infinite, negative or too large get named errors."""
    ones = np.full(2 * HIDDEN, 127, np.int8).tobytes()

    def scales(*values: float) -> bytes:
        return np.array(values, "<f4").tobytes()

    cases = [
        (_int8(b""), E.CODE_INVALID_ARGUMENT, "row_scales has 0 bytes, expected 8 with int8"),
        (_int8(scales(1, 2, 3)), E.CODE_INVALID_ARGUMENT, "row_scales has 12 bytes"),
        (_int8(scales(1, np.nan)), E.CODE_INVALID_ARGUMENT, "row_scales has nan at row 1"),
        (_int8(scales(np.inf, 1)), E.CODE_INVALID_ARGUMENT, "row_scales has inf at row 0"),
        (_int8(scales(1, -1)), E.CODE_INVALID_ARGUMENT, "row_scales has -1.0 at row 1"),
        (_int8(scales(1, 1), bytes(5)), E.CODE_INVALID_ARGUMENT, "data has 5 bytes"),
        (_int8(scales(1, 3e38), ones), E.CODE_NONFINITE_INPUT, "row 1 times its scale"),
    ]
    with expert_server(loaded_store(checkpoint, "float32")) as server, channel(server) as opened:
        messages = []
        for tensor, _, _ in cases:
            message = request(server)
            message.hidden_states.CopyFrom(tensor)
            messages += [message.SerializeToString(), request(server).SerializeToString()]
        replies = RawStream(opened, messages).read()
    for (_, code, text), reply, good in zip(cases, replies[::2], replies[1::2], strict=True):
        assert (code, text in reply.error.message) == (reply.error.code, True), reply.error
        assert good.HasField("outputs")


def test_wrong_settings_are_refused() -> None:
    """Types that the model's do not fit into, unknown ones, and any without expert workers."""
    settings = AttentionWorkerSettings(wire_dtype="float32")
    with pytest.raises(SettingsError, match="wire_dtype is float32, but the model is served in"):
        _wire_dtype(settings, "bfloat16")
    assert _wire_dtype(settings, "float32") == "float32"
    assert _wire_dtype(AttentionWorkerSettings(), "float16") == "float16"
    assert _wire_dtype(AttentionWorkerSettings(wire_dtype="int8"), "float16") == "int8"
    with pytest.raises(SettingsError, match="wire_dtype is 'int4', expected one of auto"):
        MeshSettings.from_dict({"wire_dtype": "int4"})
    with pytest.raises(SettingsError, match="experts are local"):
        MeshSettings(experts="local", wire_dtype="int8")
