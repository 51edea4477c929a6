"""Calls of the gRPC API of an in-process server over a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from expertmesh.v1 import generation_service_pb2 as pb
from expertmesh.v1.generation_service_pb2_grpc import GenerationServiceStub
from gateway.grpc_api import GrpcServer
from gateway.mesh.mesh_status import MeshStatus
from gateway.service import GenerationFrontend
from tests.support.scripted_engine import ScriptedEngine, served_model

TIMEOUT_S = 10.0


@dataclass
class Served:
    """A gRPC server in this process, and a client."""

    engine: ScriptedEngine
    frontend: GenerationFrontend
    mesh: MeshStatus
    channel: grpc.aio.Channel
    port: int
    server: GrpcServer

    @property
    def stub(self) -> GenerationServiceStub:
        """The client."""
        return GenerationServiceStub(self.channel)

    async def generate(self, **fields: Any) -> list[pb.GenerateResponse]:
        """All responses of a call."""
        call = self.stub.Generate(pb.GenerateRequest(**fields), timeout=TIMEOUT_S)
        return [response async for response in call]

    async def refused(self, **fields: object) -> tuple[grpc.StatusCode, list[object]]:
        """Code and details of a call that fails."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.generate(**fields)
        return caught.value.code(), details_of(caught.value)


def details_of(error: grpc.aio.AioRpcError) -> list[object]:
    """The google.rpc details of an error."""
    metadata = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    kinds = ("BadRequest", "ErrorInfo", "RetryInfo", "ResourceInfo")
    found = []
    for packed in status.details:
        for kind in kinds:
            message = getattr(error_details_pb2, kind)()
            if packed.Unpack(message):
                found.append(message)
    return found


@asynccontextmanager
async def serving(*, tokenizer: bool = True) -> AsyncIterator[Served]:
    """Starts the server on a free port and stops it."""
    model = served_model(tokenizer=tokenizer)
    engine = ScriptedEngine(model.tokenizer)
    frontend = GenerationFrontend(engine, model, lambda: served.mesh)
    server = GrpcServer(frontend, "127.0.0.1", 0)
    port = await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            served = Served(engine, frontend, MeshStatus(epoch=1), channel, port, server)
            yield served
    finally:
        frontend.close()
        await server.stop(0.5)
