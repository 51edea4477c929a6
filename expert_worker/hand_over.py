"""`python -m expert_worker.hand_over`: makes the expert worker of this pod leave, and waits for it.

What Kubernetes runs before it sends SIGTERM. Orders a drain (`expert_worker.drain`): the expert
worker answers on until others hold its experts. Ends once it is done, or after the timeout. The
exit code is 0 in any case, since SIGTERM comes next and asks for the same.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from dataclasses import fields

import grpc

from expertmesh.addresses import join_address
from expertmesh.errors import StartupError
from expertmesh.grpc_options import channel_options
from expertmesh.logs import configure_logging
from expertmesh.settings import ExpertWorkerOptions, LogSettings
from expertmesh.tls_settings import MeshTls
from expertmesh.transport import make_transport
from expertmesh.v1 import expert_service_pb2 as pb
from expertmesh.v1 import expert_service_pb2_grpc as rpc

TIMEOUT_S = ExpertWorkerOptions.drain_grace_s + 5.0
"""Somewhat more than a drain may take: the expert worker decides how it ends."""

POD_IP = "POD_IP"
"""Variable of the environment with the address of the pod."""

_CONNECT_S = 5.0
_MAX_MESSAGE_BYTES = 2**26

logger = logging.getLogger("hand_over")


def main(argv: list[str]) -> int:
    """Hands over; returns the exit code."""
    arguments = parse(argv)
    configure_logging(LogSettings(), "hand over")
    options = channel_options(_MAX_MESSAGE_BYTES)
    address = join_address(arguments.host, arguments.port)
    try:
        transport = make_transport(tls_of(arguments).tls_files)
        with transport.channel(address, options) as channel:
            logger.info("%s", hand_over(channel, arguments.timeout_s))
    except grpc.RpcError as error:
        logger.warning("not handed over, SIGTERM will do: %s", error.details())
    except StartupError as error:
        logger.warning("not handed over, SIGTERM will do: %s", error)
    return 0


def hand_over(channel: grpc.Channel, timeout_s: float) -> str:
    """Orders a drain and waits for its end; what came of it.

    Args:
        channel: To the expert worker.
        timeout_s: Longest wait.

    Raises:
        grpc.RpcError: It cannot be asked.
    """
    ends_s = time.monotonic() + timeout_s
    stub = rpc.ExpertServiceStub(channel)
    watch = stub.Watch(pb.WatchRequest(), timeout=min(_CONNECT_S, timeout_s))
    incarnation = next(watch).incarnation
    watch.cancel()
    progress = pb.DrainResponse()
    order = pb.DrainRequest(incarnation=incarnation)
    try:
        for progress in stub.Drain(order, timeout=max(0.0, ends_s - time.monotonic())):
            if progress.drained:
                break
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"out of time, {_left(progress)}"
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
    return f"done, {_left(progress)}"  # UNAVAILABLE: it has ended


def _left(progress: pb.DrainResponse) -> str:
    return f"{progress.experts_left} experts left"


def parse(argv: list[str]) -> argparse.Namespace:
    """`host`, `port`, `timeout_s`, and the fields of `MeshTls`."""
    parser = argparse.ArgumentParser(prog="expert_worker.hand_over", description=__doc__)
    # A kubelet puts no variables into the command of a hook, so that address is looked up here.
    host = os.environ.get(POD_IP, ExpertWorkerOptions.host)
    parser.add_argument("--host", default=host, help=f"of the expert worker; ${POD_IP} if set")
    parser.add_argument("--port", type=int, default=ExpertWorkerOptions.port, help="of it")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, help="longest wait")
    for entry in fields(MeshTls):
        flag = f"--{entry.name.replace('_', '-')}"
        parser.add_argument(flag, default="", help="as the expert worker has it")
    return parser.parse_args(argv)


def tls_of(arguments: argparse.Namespace) -> MeshTls:
    """How the expert worker is to be spoken to.

    Raises:
        SettingsError: Some files are missing.
    """
    return MeshTls(**{entry.name: getattr(arguments, entry.name) for entry in fields(MeshTls)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
