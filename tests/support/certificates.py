"""A certificate authority for tests, and certificates of it."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from expertmesh.tls_settings import TlsFiles

_DAY = datetime.timedelta(days=1)
_LOOPBACK = ipaddress.ip_address("127.0.0.1")


@dataclass(frozen=True)
class Authority:
    """Signs certificates.

    Args:
        key: Of it.
        certificate: What others trust.
    """

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def new(cls, name: str = "test authority") -> Authority:
        """Nobody has seen it before."""
        key = ec.generate_private_key(ec.SECP256R1())
        basic = x509.BasicConstraints(ca=True, path_length=None)
        builder = _builder(_name(name), _name(name), key).add_extension(basic, critical=True)
        return cls(key, builder.sign(key, hashes.SHA256()))

    def issue(
        self,
        folder: Path,
        name: str = "expert-worker",
        *,
        days: int = 1,
        purposes: Sequence[x509.ObjectIdentifier] = (),
        trusted: Sequence[Authority] = (),
    ) -> TlsFiles:
        """Puts a new certificate for a name and for 127.0.0.1, its key and an authority into a
        folder; files that are there are replaced at once, as a kubelet does.

        Args:
            folder: Where to.
            name: Of whom.
            days: For which it is valid; it began two days ago.
            purposes: What alone it is to be used for; by default that is left open.
            trusted: Whose certificates are taken from others; by default this one's.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.DNSName(name), x509.IPAddress(_LOOPBACK)])
        builder = _builder(_name(name), self.certificate.subject, key, days)
        builder = builder.add_extension(names, critical=False)
        if purposes:
            builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        certificate = builder.sign(self.key, hashes.SHA256())
        folder.mkdir(exist_ok=True)
        encoding = serialization.Encoding.PEM
        private = key.private_bytes(
            encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return TlsFiles(
            cert=_replace(folder / "tls.crt", certificate.public_bytes(encoding)),
            key=_replace(folder / "tls.key", private),
            ca=trust(folder, trusted or (self,)),
        )


def trust(folder: Path, authorities: Sequence[Authority]) -> str:
    """Puts authorities into a folder, as a file that is replaced at once; its path."""
    pems = (each.certificate.public_bytes(serialization.Encoding.PEM) for each in authorities)
    return _replace(folder / "ca.crt", b"".join(pems))


def mesh_flags(files: TlsFiles) -> tuple[str, ...]:
    """Of a process that has these files."""
    return (
        *("--tls-cert-file", files.cert, "--tls-key-file", files.key),
        *("--tls-ca-file", files.ca),
    )


def serial_of(pem: bytes) -> int:
    """The number of a certificate."""
    return x509.load_pem_x509_certificate(pem).serial_number


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int = 1
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 2 * _DAY)
        .not_valid_after(now + days * _DAY)
    )


def _replace(path: Path, content: bytes) -> str:
    new = path.with_suffix(".new")
    new.write_bytes(content)
    os.replace(new, path)
    return str(path)
