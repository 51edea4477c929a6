"""Certificates of the public APIs; both are plain text without."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Protocol

import grpc

from expertmesh.errors import SettingsError
from expertmesh.settings import HttpSettings
from expertmesh.transport import check_pair
from gateway.file_stamp import stamp_of

logger = logging.getLogger("gateway")

_FLAGS = ("--api-tls-cert-file", "--api-tls-key-file")


class ApiTransport(Protocol):
    """How clients connect."""

    @property
    def ssl_context(self) -> ssl.SSLContext | None:
        """Of the HTTP server."""

    def bind(self, server: grpc.aio.Server, address: str) -> int:
        """Binds the gRPC server; returns the port. Raises RuntimeError if it cannot."""


class PlainApi:
    """Plain text."""

    ssl_context = None

    def bind(self, server: grpc.aio.Server, address: str) -> int:
        """See ApiTransport."""
        return server.add_insecure_port(address)


class TlsApi:
    """With a certificate, which is read anew for each connection once its file has changed.

    Args:
        cert: Path of the certificate.
        key: Path of its private key.

    Raises:
        SettingsError: They cannot be used; names the file.
    """

    def __init__(self, cert: str, key: str) -> None:
        self._paths = Path(cert), Path(key)
        check_pair(_FLAGS, cert, key, serves=True)
        self._failing = ""
        self._seen = stamp_of(self._paths)
        self._latest = self._context()
        self.ssl_context = self._context()
        self.ssl_context.sni_callback = self._greet
        self._grpc = self._grpc_configuration()

    def bind(self, server: grpc.aio.Server, address: str) -> int:
        """See ApiTransport."""
        credentials = grpc.dynamic_ssl_server_credentials(
            self._grpc, self._latest_configuration, require_client_authentication=False
        )
        return server.add_secure_port(address, credentials)

    def _greet(
        self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext
    ) -> None:
        """A client begins: it gets the latest certificate."""
        self._refresh()
        connection.context = self._latest

    def _latest_configuration(self) -> grpc.ServerCertificateConfiguration:
        self._refresh()
        return self._grpc

    def _refresh(self) -> None:
        """Reads changed files; those in the middle of a change are read with the next client."""
        stamp = stamp_of(self._paths)
        if stamp == self._seen:
            return
        try:
            check_pair(_FLAGS, *map(str, self._paths), serves=True)
            context, configuration = self._context(), self._grpc_configuration()
        except (SettingsError, OSError, ssl.SSLError) as error:
            if str(error) != self._failing:
                logger.warning("still using the last certificate of the API: %s", error)
            self._failing = str(error)
            return
        self._failing = ""
        if stamp_of(self._paths) == stamp:  # what was checked is what was read
            self._latest, self._grpc, self._seen = context, configuration, stamp

    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self._paths)
        return context

    def _grpc_configuration(self) -> grpc.ServerCertificateConfiguration:
        cert, key = (path.read_bytes() for path in self._paths)
        return grpc.ssl_server_certificate_configuration([(key, cert)])


def make_api_transport(http: HttpSettings) -> ApiTransport:
    """By the settings.

    Raises:
        SettingsError: The certificate cannot be used; names the file.
    """
    if not http.api_tls_cert_file:
        return PlainApi()
    return TlsApi(http.api_tls_cert_file, http.api_tls_key_file)
