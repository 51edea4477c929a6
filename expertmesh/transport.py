"""How gateways and expert workers are connected: in plain text, or both showing a certificate.

Expert workers are dialled by the address of a pod, which no certificate names. So all of them have
one for the same name, and a certificate of the mesh's own authority is what belonging to it means.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import grpc

from expertmesh.errors import SettingsError
from expertmesh.grpc_options import Option
from expertmesh.tls_settings import TlsFiles

logger = logging.getLogger(__name__)

EXPERT_WORKER_NAME = "expert-worker"
"""What the certificates of expert workers are for."""

_MOST_FLIGHTS = 3  # of TLS 1.2, each way
_TRIES = 3

Pems = tuple[bytes, bytes, bytes]
"""Certificate, key, authority."""


class Transport(Protocol):
    """Makes both ends of connections. Methods may be called from any thread."""

    allows_direct: bool
    """Whether rows may travel over connections that gRPC does not make (docs/adr/0011)."""

    def channel(self, address: str, options: Sequence[Option]) -> grpc.Channel:
        """To an expert worker; for one connection, so that the next one reads certificates anew."""

    def bind(self, server: grpc.Server, address: str) -> int:
        """Binds an expert worker's server; returns the port. Raises RuntimeError if it cannot."""


class Plaintext:
    """Everybody who reaches a port is answered."""

    allows_direct = True

    def channel(self, address: str, options: Sequence[Option]) -> grpc.Channel:
        """See Transport."""
        return grpc.insecure_channel(address, options=options)

    def bind(self, server: grpc.Server, address: str) -> int:
        """See Transport."""
        return server.add_insecure_port(address)


class MutualTls:
    """Both ends show a certificate of the same authority.

    Args:
        files: Of this process.
        serves: Whether their certificate is to be one for servers; else one for clients will do.

    Raises:
        SettingsError: A file cannot be used; names it.
    """

    allows_direct = False

    def __init__(self, files: TlsFiles, *, serves: bool = False) -> None:
        self._pems = ReloadedPems(files, serves=serves)

    def channel(self, address: str, options: Sequence[Option]) -> grpc.Channel:
        """See Transport."""
        cert, key, ca = self._pems.latest()
        credentials = grpc.ssl_channel_credentials(ca, key, cert)
        named: Option = ("grpc.ssl_target_name_override", EXPERT_WORKER_NAME)
        return grpc.secure_channel(address, credentials, options=[*options, named])

    def bind(self, server: grpc.Server, address: str) -> int:
        """See Transport."""
        credentials = grpc.dynamic_ssl_server_credentials(
            _server_configuration(self._pems.latest()),
            lambda: _server_configuration(self._pems.latest()),  # for each connection
            require_client_authentication=True,
        )
        return server.add_secure_port(address, credentials)


class ReloadedPems:
    """What is in the files; if they do not fit together, as in the middle of a change, what was.

    Args:
        files: To read.
        serves: See MutualTls.

    Raises:
        SettingsError: A file cannot be used; names it.
    """

    def __init__(self, files: TlsFiles, *, serves: bool) -> None:
        self._files, self._serves = files, serves
        self._pems = _read(files, serves=serves)
        self._failing = ""

    def latest(self) -> Pems:
        """Reads them anew."""
        try:
            self._pems, self._failing = _read(self._files, serves=self._serves), ""
        except SettingsError as error:
            if error.message != self._failing:
                logger.warning("still using the last certificate: %s", error.message)
            self._failing = error.message
        return self._pems


def make_transport(files: TlsFiles | None, *, serves: bool = False) -> Transport:
    """By the settings; arguments as in `MutualTls`.

    Raises:
        SettingsError: A file cannot be used; names it.
    """
    return Plaintext() if files is None else MutualTls(files, serves=serves)


def check_pair(flags: tuple[str, str], cert: str, key: str, *, serves: bool) -> None:
    """Raises SettingsError unless a certificate and a private key can be used together.

    Args:
        flags: How the files are given, for messages.
        cert: Path.
        key: Path.
        serves: Whether they are used by a server; else by a client.
    """
    for flag, path in zip(flags, (cert, key), strict=True):
        _bytes_of(flag, path)
    try:
        _shake_hands(cert, key, serves=serves)
    except (OSError, ValueError) as error:  # ssl.SSLError is one, and so is a file that is gone
        reason = getattr(error, "verify_message", None) or getattr(error, "reason", None)
        raise SettingsError(
            f"{flags[0]} {cert} and {flags[1]} {key} cannot be used together: {reason or error}",
            fix="expected a valid certificate and its private key, both in PEM format",
        ) from error


def _shake_hands(cert: str, key: str, *, serves: bool) -> None:
    """A server and a client with this certificate, in memory: the way of `ssl` to say whether it is
    valid today, and for what it is used. One end looks at that of the other, and trusts it alone.
    Raises OSError or ValueError."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    for context in (server, client):
        context.load_cert_chain(cert, key, password=_no_password)
    judge = client if serves else server
    judge.verify_mode = ssl.CERT_REQUIRED
    judge.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    judge.load_verify_locations(cert)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    for _ in range(_MOST_FLIGHTS):
        for end in ends:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()


def _read(files: TlsFiles, *, serves: bool) -> Pems:
    for _ in range(_TRIES):
        before = _read_once(files, serves=serves)
        if _read_once(files, serves=serves) == before:  # what was checked is what was read
            return before
    raise SettingsError(f"--tls-cert-file {files.cert}: it changes all the time")


def _read_once(files: TlsFiles, *, serves: bool) -> Pems:
    """Reads, then checks what is there by then."""
    pems = (
        _bytes_of("--tls-cert-file", files.cert),
        _bytes_of("--tls-key-file", files.key),
        _bytes_of("--tls-ca-file", files.ca),
    )
    check_pair(("--tls-cert-file", "--tls-key-file"), files.cert, files.key, serves=serves)
    ca = pems[2]
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=ca.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise SettingsError(
            f"--tls-ca-file {files.ca} holds no certificate in PEM format"
        ) from error
    return pems


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def _bytes_of(flag: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SettingsError(f"{flag} {path} cannot be read: {error.strerror or error}") from error


def _server_configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    cert, key, ca = pems
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)
