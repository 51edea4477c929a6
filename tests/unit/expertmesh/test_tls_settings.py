"""What may be open to a network, and which settings of TLS belong together."""

from __future__ import annotations

import logging

import pytest

from expertmesh.errors import SettingsError
from expertmesh.settings import ExpertWorkerOptions, HttpSettings
from expertmesh.tls_settings import MeshTls, is_local, warn_of_exposure


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *[(host, True) for host in ("127.0.0.1", "127.77.0.3", "::1", "localhost", "LOCALHOST.")],
        *[(host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "fe80::1%eth0", "gateway")],
    ],
)
def test_local_addresses(host: str, expected: bool) -> None:
    """Those of which the loopback interface is the only way; names may lead anywhere."""
    assert is_local(host) is expected


@pytest.mark.parametrize("kind", [HttpSettings, ExpertWorkerOptions])
def test_plain_text_on_a_network_is_refused(
    kind: type[HttpSettings] | type[ExpertWorkerOptions],
) -> None:
    """Unless it is asked for; nothing is asked on this machine."""
    with pytest.raises(SettingsError, match=r"host is 0\.0\.0\.0, which others") as caught:
        kind(host="0.0.0.0")
    assert "--insecure" in caught.value.fix
    assert kind(host="0.0.0.0", insecure=True).insecure
    assert kind(host="127.0.0.1").host == "127.0.0.1"


def test_encrypted_servers_may_be_reached() -> None:
    """With certificates nothing else is needed."""
    tls = {"tls_cert_file": "c", "tls_key_file": "k", "tls_ca_file": "a"}
    assert ExpertWorkerOptions(host="10.0.0.1", **tls).tls == MeshTls(**tls)
    assert HttpSettings(host="10.0.0.1", api_tls_cert_file="c", api_tls_key_file="k")


@pytest.mark.parametrize("given", ["tls_cert_file", "tls_key_file", "tls_ca_file"])
def test_files_of_the_mesh_come_together(given: str) -> None:
    """The message names one that is there and one that is not."""
    with pytest.raises(SettingsError, match=f"{given} is set, but not tls_") as caught:
        MeshTls(**{given: "file"})
    assert caught.value.fix.count(" FILE") == 2


@pytest.mark.parametrize("given", ["api_tls_cert_file", "api_tls_key_file"])
def test_files_of_the_api_come_together(given: str) -> None:
    """One alone is refused."""
    with pytest.raises(SettingsError, match="one is set, expected both"):
        HttpSettings.from_dict({given: "file"})


def test_exposure_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """At each start, if there is any."""
    with caplog.at_level(logging.WARNING):
        warn_of_exposure("127.0.0.1", encrypted=False)
        warn_of_exposure("10.0.0.1", encrypted=True)
        assert caplog.messages == []
        warn_of_exposure("10.0.0.1", encrypted=False)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("--insecure: plain text on 10.0.0.1")
