"""Mutual TLS between gRPC peers of this process, and which files are refused."""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

from expertmesh.errors import SettingsError
from expertmesh.tls_settings import TlsFiles
from expertmesh.transport import MutualTls, Plaintext, Transport, make_transport
from tests.support.certificates import Authority

DEADLINE_S = 20.0
_METHOD = "/test.Echo/Echo"


@pytest.fixture(scope="module")
def authority() -> Authority:
    """Of the mesh."""
    return Authority.new()


@contextmanager
def echo_server(transport: Transport) -> Iterator[str]:
    """Answers each message with itself; its address."""

    def echo(requests: Iterator[bytes], _context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from requests

    pool = ThreadPoolExecutor(4, "test-echo")
    server = grpc.server(pool)
    handler = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Echo", {"Echo": handler}),)
    )
    port = transport.bind(server, "127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait(DEADLINE_S)
        pool.shutdown()


def echoed(transport: Transport, address: str) -> bytes:
    """What comes back over a new connection."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    with transport.channel(address, options) as channel:
        answers = channel.stream_stream(_METHOD)(iter([b"hello"]), timeout=DEADLINE_S)
        return next(iter(answers))


def test_who_belongs_to_the_mesh_is_answered(authority: Authority, tmp_path: Path) -> None:
    """Each end has a certificate of the authority; the address is in none that a client checks."""
    worker = MutualTls(authority.issue(tmp_path / "worker"), serves=True)
    gateway = MutualTls(authority.issue(tmp_path / "gateway", "gateway"))
    with echo_server(worker) as address:
        assert echoed(gateway, address) == b"hello"


def test_certificates_for_clients_or_servers_alone(authority: Authority, tmp_path: Path) -> None:
    """A gateway's need not be one for servers, nor that of an expert worker one for clients; the
    other way round they are refused at the start."""
    for_clients = authority.issue(
        tmp_path / "gateway", "gateway", purposes=[ExtendedKeyUsageOID.CLIENT_AUTH]
    )
    for_servers = authority.issue(tmp_path / "worker", purposes=[ExtendedKeyUsageOID.SERVER_AUTH])
    with echo_server(MutualTls(for_servers, serves=True)) as address:
        assert echoed(MutualTls(for_clients), address) == b"hello"
    with pytest.raises(SettingsError, match="unsuitable certificate purpose"):
        make_transport(for_clients, serves=True)
    with pytest.raises(SettingsError, match="unsuitable certificate purpose"):
        make_transport(for_servers)


def test_others_are_refused(authority: Authority, tmp_path: Path) -> None:
    """Plain text, no certificate, and one of another authority: no call is answered."""
    worker = MutualTls(authority.issue(tmp_path / "worker"), serves=True)
    other = MutualTls(Authority.new().issue(tmp_path / "other", "gateway"))
    ca = Path(tmp_path / "worker" / "ca.crt").read_bytes()
    with echo_server(worker) as address:
        for stranger in (Plaintext(), other, _Nameless(ca)):
            with pytest.raises(grpc.RpcError) as caught:
                echoed(stranger, address)
            assert isinstance(caught.value, grpc.Call)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_servers_that_are_no_expert_worker_are_refused(
    authority: Authority, tmp_path: Path
) -> None:
    """A certificate of the mesh is not enough: it has to be that of an expert worker."""
    gateway = MutualTls(authority.issue(tmp_path / "gateway", "gateway"))
    with echo_server(gateway) as address, pytest.raises(grpc.RpcError):
        echoed(gateway, address)


class _Nameless(Plaintext):
    """Trusts the authority, and shows nothing."""

    def __init__(self, ca: bytes) -> None:
        self._ca = ca

    def channel(self, address: str, options: object) -> grpc.Channel:
        name = ("grpc.ssl_target_name_override", "expert-worker")
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(self._ca), [name])


def test_certificates_change_without_a_cut(tmp_path: Path) -> None:
    """A stream goes on while both certificates, and even the authority, are replaced; who has only
    the old ones is refused from then on."""
    before, after = Authority.new(), Authority.new()
    worker = MutualTls(before.issue(tmp_path / "worker"), serves=True)
    gateway = MutualTls(before.issue(tmp_path / "gateway", "gateway"))
    old = MutualTls(before.issue(tmp_path / "old", "gateway"))
    with echo_server(worker) as address, gateway.channel(address, []) as channel:
        messages = _Messages()
        answers = iter(channel.stream_stream(_METHOD)(messages, timeout=DEADLINE_S))
        messages.put(b"one")
        assert next(answers) == b"one"
        after.issue(tmp_path / "worker")
        after.issue(tmp_path / "gateway", "gateway")
        assert echoed(gateway, address) == b"hello"
        with pytest.raises(grpc.RpcError):
            echoed(old, address)
        messages.put(b"two")
        assert next(answers) == b"two"
        messages.put(None)


class _Messages:
    """An iterator of what is put in, until None."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def put(self, message: bytes | None) -> None:
        self._queue.put(message)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._queue.get, None)

    def __next__(self) -> bytes:
        message = self._queue.get()
        if message is None:
            raise StopIteration
        return message


def test_half_a_change_keeps_what_was(authority: Authority, tmp_path: Path) -> None:
    """A certificate whose key has not come yet is not used."""
    worker = MutualTls(authority.issue(tmp_path / "worker"), serves=True)
    gateway = MutualTls(authority.issue(tmp_path / "gateway", "gateway"))
    with echo_server(worker) as address:
        stray = authority.issue(tmp_path / "stray")
        Path(tmp_path / "worker" / "tls.crt").write_bytes(Path(stray.cert).read_bytes())
        assert echoed(gateway, address) == b"hello"


def test_a_file_that_goes_while_it_is_read(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if files were removed and written anew: connections begin with what was."""
    worker = MutualTls(authority.issue(tmp_path / "worker"), serves=True)
    files = authority.issue(tmp_path / "gateway", "gateway")
    gateway = MutualTls(files)
    read_bytes, reads = Path.read_bytes, Counter[str]()

    def read_and_remove(path: Path) -> bytes:
        content = read_bytes(path)
        reads[str(path)] += 1
        if reads[files.key] == 2:  # what follows is OpenSSL's own reading
            Path(files.key).unlink()
        return content

    monkeypatch.setattr(Path, "read_bytes", read_and_remove)
    with echo_server(worker) as address:
        assert echoed(gateway, address) == b"hello"
    assert not Path(files.key).exists()


@pytest.mark.parametrize(
    ("broken", "content", "expected"),
    [
        ("cert", None, "--tls-cert-file {cert} cannot be read: No such file or directory"),
        ("key", None, "--tls-key-file {key} cannot be read: No such file or directory"),
        ("ca", None, "--tls-ca-file {ca} cannot be read: No such file or directory"),
        ("cert", b"nothing", "--tls-cert-file {cert} and --tls-key-file {key} cannot be used"),
        ("key", b"nothing", "--tls-cert-file {cert} and --tls-key-file {key} cannot be used"),
        ("ca", b"nothing", "--tls-ca-file {ca} holds no certificate in PEM format"),
        ("ca", b"\xff\xfe", "--tls-ca-file {ca} holds no certificate in PEM format"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    authority: Authority, tmp_path: Path, broken: str, content: bytes | None, expected: str
) -> None:
    """With the flag and the path."""
    files = authority.issue(tmp_path / "worker")
    path = Path(getattr(files, broken))
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        make_transport(files)
    assert caught.value.message.startswith(expected.format(**vars(files)))


def test_key_of_another_certificate_is_refused(authority: Authority, tmp_path: Path) -> None:
    """It says that the two do not belong together."""
    one, other = authority.issue(tmp_path / "one"), authority.issue(tmp_path / "other")
    with pytest.raises(SettingsError, match="KEY_VALUES_MISMATCH"):
        make_transport(TlsFiles(one.cert, other.key, one.ca))


def test_certificate_that_has_ended_is_refused(authority: Authority, tmp_path: Path) -> None:
    """At the start; one that comes later does not replace one that is valid."""
    for serves in (False, True):
        with pytest.raises(SettingsError, match="certificate has expired"):
            make_transport(authority.issue(tmp_path / "late", days=-1), serves=serves)
    worker = MutualTls(authority.issue(tmp_path / "worker"), serves=True)
    gateway = MutualTls(authority.issue(tmp_path / "gateway", "gateway"))
    authority.issue(tmp_path / "worker", days=-1)
    with echo_server(worker) as address:
        assert echoed(gateway, address) == b"hello"


def test_plain_text_without_files() -> None:
    """The default."""
    assert isinstance(make_transport(None), Plaintext)
