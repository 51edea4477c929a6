"""Options of gRPC channels and servers inside the mesh; both ends must fit each other.

Deadlines find a peer that hangs; keepalive is what is left for an idle connection. The documented
keepalive settings alone notice a stopped process after a minute: `http2.ping_timeout_ms` is what
counts.
"""

from __future__ import annotations

Option = tuple[str, int | str]
Options = list[Option]

KEEPALIVE_MS = 1000
PING_TIMEOUT_MS = 500
_METADATA_BYTES = 16 * 1024


def channel_options(max_message_bytes: int) -> Options:
    """For a client of the mesh.

    Args:
        max_message_bytes: Largest message in either direction.
    """
    return [
        *_common(max_message_bytes),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 200),
        # Despite its name this is the time limit of one attempt to connect.
        ("grpc.min_reconnect_backoff_ms", 2000),
        ("grpc.enable_retries", 0),  # a call is repeated on another copy, by our own code
        ("grpc.use_local_subchannel_pool", 1),  # a connection is never shared or reused
    ]


def server_options(max_message_bytes: int) -> Options:
    """For a server of the mesh.

    Args:
        max_message_bytes: Largest message in either direction.
    """
    return [
        *_common(max_message_bytes),
        ("grpc.so_reuseport", 0),  # two servers must not share a port unnoticed
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def _common(max_message_bytes: int) -> Options:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_metadata_size", _METADATA_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
    ]
