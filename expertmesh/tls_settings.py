"""Settings of who may be spoken to: certificates of the mesh, and what is open to a network."""

from __future__ import annotations

import ipaddress
import logging
from dataclasses import dataclass, fields

from expertmesh.errors import SettingsError
from expertmesh.settings_base import Settings

logger = logging.getLogger(__name__)

_LOCAL_NAMES = ("localhost", "ip6-localhost")


@dataclass(frozen=True)
class TlsFiles:
    """Files in PEM format, read anew whenever a connection begins."""

    cert: str
    key: str
    ca: str


@dataclass(frozen=True)
class ApiTls(Settings):
    """Who may read along between clients and the APIs."""

    api_tls_cert_file: str = ""
    """Certificate (PEM, with what leads to the authority) of the HTTP and the gRPC API, which are
    plain text without. A file that changes is read anew."""
    api_tls_key_file: str = ""
    """Private key of --api-tls-cert-file."""

    def __post_init__(self) -> None:
        """Checks that both are given, or none."""
        if bool(self.api_tls_cert_file) != bool(self.api_tls_key_file):
            raise SettingsError("api_tls_cert_file and api_tls_key_file: one is set, expected both")


@dataclass(frozen=True)
class MeshTls(Settings):
    """How gateways and expert workers prove to each other who they are."""

    tls_cert_file: str = ""
    """Certificate of this process (PEM, with what leads to the authority) for connections between
    gateways and expert workers, both of which have to show one; that of an expert worker is for the
    name expert-worker. A file that changes is read anew. Without, they speak plain text."""
    tls_key_file: str = ""
    """Private key of --tls-cert-file."""
    tls_ca_file: str = ""
    """Certificate of the authority that has signed those of the others."""

    def __post_init__(self) -> None:
        """Checks that all three are given, or none."""
        given = {entry.name: getattr(self, entry.name) for entry in fields(MeshTls)}
        missing = [name for name, value in given.items() if not value]
        if missing and len(missing) < len(given):
            present = next(name for name in given if name not in missing)
            raise SettingsError(
                f"{present} is set, but not {missing[0]}, expected all of {', '.join(given)}",
                fix=f"add {' '.join('--' + name.replace('_', '-') + ' FILE' for name in missing)}",
            )

    @property
    def tls(self) -> MeshTls:
        """This part of the settings alone, to hand on."""
        return MeshTls(self.tls_cert_file, self.tls_key_file, self.tls_ca_file)

    @property
    def tls_files(self) -> TlsFiles | None:
        """None: plain text."""
        if not self.tls_cert_file:
            return None
        return TlsFiles(self.tls_cert_file, self.tls_key_file, self.tls_ca_file)


def is_local(host: str) -> bool:
    """True if only this machine can reach what is bound to an address."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host.lower().rstrip(".") in _LOCAL_NAMES


def check_exposure(host: str, *, encrypted: bool, insecure: bool, fix: str) -> None:
    """Raises SettingsError for plain text on a network that nobody has asked for.

    Args:
        host: Address to bind.
        encrypted: Whether connections are.
        insecure: Whether plain text was asked for.
        fix: How to encrypt them.
    """
    if not (encrypted or insecure or is_local(host)):
        raise SettingsError(
            f"host is {host}, which others than this machine may reach, without TLS",
            fix=f"{fix}, or accept plain text with --insecure",
        )


def warn_of_exposure(host: str, *, encrypted: bool) -> None:
    """Says at each start that --insecure lets a network reach a server."""
    if not (encrypted or is_local(host)):
        logger.warning(
            "--insecure: plain text on %s, which whoever is on the network can read and write",
            host,
        )
