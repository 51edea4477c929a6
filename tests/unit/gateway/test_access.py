"""Who may call: API keys, browsers of other origins; and what load balancers are told."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import grpc
import pytest

from expertmesh.errors import AuthenticationError, SettingsError
from expertmesh.processes import child_environment
from expertmesh.settings import HttpSettings
from expertmesh.v1 import generation_service_pb2 as pb
from expertmesh.v1.generation_service_pb2_grpc import GenerationServiceStub
from gateway.api_keys import (
    ADMIN_DIGESTS_VARIABLE,
    ADMIN_KEYS_VARIABLE,
    DIGESTS_VARIABLE,
    KEYS_VARIABLE,
    ApiKeys,
    bearer_key,
    collect_keys,
)
from gateway.app import Access
from gateway.grpc_api import GrpcServer
from gateway.sequence import EngineStats
from tests.support.openai_calls import CHAT, HELLO
from tests.support.scripted_engine import Gateway, scripted_gateway, served_model

KEY = "sk-test-0123456789"
OTHER = "sk-test-9876543210"
GUARDED = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", CHAT),
    ("POST", "/v1/completions"),
    ("POST", "/v1/messages"),
    ("GET", "/v1/unknown"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
    ("GET", "/server_info"),
    ("GET", "/unknown"),
]
OPEN = ["/health", "/ready", "/ping", "/version", "/metrics", "/load"]


@pytest.fixture
async def guarded() -> AsyncIterator[Gateway]:
    """A server that wants a key."""
    access = Access(keys=ApiKeys.of([OTHER, KEY]), origins=("https://chat.example",))
    async with scripted_gateway(access=access) as running:
        yield running


@pytest.mark.parametrize(("method", "path"), GUARDED)
async def test_guarded_paths_want_a_key(
    guarded: Gateway, session: aiohttp.ClientSession, method: str, path: str
) -> None:
    """Without an accepted key: 401 in the envelope, and how to show one; nothing is done."""
    wrong = ["", "Bearer", "Bearer ", f"Bearer {KEY}x", f"Basic {KEY}", KEY, f"Bearer {KEY[:-1]}"]
    for authorization in (None, *wrong, "Bearer \xe9\xff"):
        headers = {} if authorization is None else {"Authorization": authorization}
        url = guarded.url + path
        async with session.request(method, url, json=HELLO, headers=headers) as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
            error = (await response.json())["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert KEY not in json.dumps(error)
    assert guarded.engine.requests == []


async def test_every_accepted_key_opens(guarded: Gateway, session: aiohttp.ClientSession) -> None:
    """Each key is enough; the scheme may be written in any case."""
    for authorization in (f"Bearer {KEY}", f"bearer  {OTHER}"):
        headers = {"Authorization": authorization}
        async with session.post(guarded.url + CHAT, json=HELLO, headers=headers) as response:
            assert response.status == 200


async def test_anthropic_header(guarded: Gateway, session: aiohttp.ClientSession) -> None:
    """x-api-key counts for /v1/messages alone."""
    for path, expected in (("/v1/messages", False), (CHAT, True)):
        async with session.post(
            guarded.url + path, json=HELLO, headers={"x-api-key": KEY}
        ) as response:
            assert (response.status == 401) == expected


async def test_open_paths(guarded: Gateway, session: aiohttp.ClientSession) -> None:
    """Probes and monitoring need no key, HEAD included."""
    for path in OPEN:
        for method in ("GET", "HEAD"):
            async with session.request(method, guarded.url + path) as response:
                assert response.status == 200, path
                assert method == "GET" or await response.read() == b""


async def test_keys_are_not_shown(
    guarded: Gateway, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither settings nor log have a key or a digest."""
    headers = {"Authorization": f"Bearer {KEY}"}
    with caplog.at_level(logging.DEBUG):
        async with session.get(f"{guarded.url}/server_info", headers=headers) as response:
            text = await response.text()
        async with session.get(f"{guarded.url}/v1/models", headers={"Authorization": KEY}):
            pass
    (digest,) = ApiKeys.of([KEY]).to_environment().values()
    for secret in (KEY, OTHER, digest):
        assert secret not in text
        assert secret not in caplog.text
    assert json.loads(text)["settings"] == {"http": {"port": 1}}


async def test_without_keys_everybody_is_served(session: aiohttp.ClientSession) -> None:
    """A key that nobody asked for does not disturb."""
    async with scripted_gateway() as gateway:
        headers = {"Authorization": "Bearer whatever"}
        async with session.get(f"{gateway.url}/v1/models", headers=headers) as response:
            assert response.status == 200


async def test_grpc_calls_want_a_key(guarded: Gateway) -> None:
    """Metadata `authorization`; without it UNAUTHENTICATED, in both kinds of calls."""
    server = GrpcServer(guarded.frontend, "127.0.0.1", 0, ApiKeys.of([KEY]))
    port = await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = GenerationServiceStub(channel)
            for metadata in ((), (("authorization", f"Bearer {OTHER}"),)):
                for call in (
                    stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=metadata, timeout=10),
                    anext(
                        aiter(
                            stub.Generate(
                                pb.GenerateRequest(prompt="a"), metadata=metadata, timeout=10
                            )
                        )
                    ),
                ):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call
                    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            good = (("authorization", f"Bearer {KEY}"),)
            info = await stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=good, timeout=10)
            assert info.ready
    finally:
        await server.stop(0.5)


async def test_browsers_of_allowed_origins(
    guarded: Gateway, session: aiohttp.ClientSession
) -> None:
    """The question of a browser needs no key; only allowed pages may read answers."""
    ask = {"Access-Control-Request-Method": "POST"}
    for origin, allowed in (("https://chat.example", True), ("https://evil.example", False)):
        headers = {"Origin": origin}
        async with session.options(guarded.url + CHAT, headers={**headers, **ask}) as response:
            assert (response.status == 204) == allowed
            assert ("Access-Control-Allow-Origin" in response.headers) == allowed
        headers["Authorization"] = f"Bearer {KEY}"
        async with session.post(guarded.url + CHAT, json=HELLO, headers=headers) as response:
            assert response.status == 200
            found = response.headers.get("Access-Control-Allow-Origin")
            assert found == (origin if allowed else None)


async def test_no_origin_is_allowed_by_default(session: aiohttp.ClientSession) -> None:
    """Without the setting there is no header, and the question is not understood."""
    async with scripted_gateway() as gateway:
        headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        async with session.options(gateway.url + CHAT, headers=headers) as response:
            assert response.status == 405
            assert "Access-Control-Allow-Origin" not in response.headers


@pytest.mark.parametrize(
    ("value", "expected"),
    [("*", ("*",)), ("", ()), ("https://a:1, http://b", ("https://a:1", "http://b"))],
)
def test_origins(value: str, expected: tuple[str, ...]) -> None:
    """A list with commas."""
    assert HttpSettings(allowed_origins=value).origins == expected


def test_wrong_origins() -> None:
    """An origin has a scheme and no path."""
    for value in ("chat.example", "https://a/b", "https://a,x"):
        with pytest.raises(SettingsError, match="allowed_origins"):
            HttpSettings(allowed_origins=value)


async def test_load_report(session: aiohttp.ClientSession) -> None:
    """With an answer, in the format that was asked for; none that is unknown."""
    async with scripted_gateway() as gateway:
        gateway.engine.load = EngineStats(
            num_running=3, num_waiting=2, kv_blocks_used=1, kv_blocks_total=4
        )
        found = {}
        for wanted in ("TEXT", "json", "BIN"):
            headers = {"endpoint-load-metrics-format": wanted}
            for body in (HELLO, {**HELLO, "stream": True}):
                async with session.post(gateway.url + CHAT, json=body, headers=headers) as response:
                    found[wanted] = response.headers.get("endpoint-load-metrics")
        assert found["TEXT"] == (
            "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_running=3.0, "
            "named_metrics.num_requests_waiting=2.0"
        )
        kind, _, report = str(found["json"]).partition(" ")
        assert (kind, json.loads(report)["named_metrics"]["num_requests_waiting"]) == ("JSON", 2)
        assert found["BIN"] is None
        async with session.get(f"{gateway.url}/load") as response:
            assert await response.json() == {"server_load": 5}
            assert "endpoint-load-metrics" not in response.headers


async def test_ping(session: aiohttp.ClientSession) -> None:
    """GET and POST, as /health."""
    async with scripted_gateway() as gateway:
        for alive, status in ((True, 200), (False, 503)):
            gateway.engine.load = EngineStats(alive=alive)
            for method in ("GET", "POST", "HEAD"):
                async with session.request(method, f"{gateway.url}/ping") as response:
                    assert (response.status, await response.read()) == (status, b"")


async def test_the_model_must_be_named(session: aiohttp.ClientSession) -> None:
    """With the setting, absent, null and empty names are refused; the right one is not."""
    async with scripted_gateway(model=served_model(name_required=True)) as gateway:
        for extra, status in (
            ({}, 400),
            ({"model": None}, 400),
            ({"model": ""}, 400),
            ({"model": "tiny"}, 200),
        ):
            async with session.post(gateway.url + CHAT, json={**HELLO, **extra}) as response:
                assert response.status == status
                if status == 400:
                    assert (await response.json())["error"]["param"] == "model"
        # Clients that only need the tokenizer do not name a model.
        async with session.post(f"{gateway.url}/tokenize", json={"prompt": "hi"}) as response:
            assert response.status == 200


def test_keys_come_from_all_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags, environment and file; afterwards no child can find one in its environment."""
    file = tmp_path / "keys"
    file.write_text("# of the team\nfile-key-1\n\n  file-key-2  \n")
    monkeypatch.setenv(KEYS_VARIABLE, "env-key-01, env-key-02\nflag-key-1")
    found = collect_keys(["flag-key-1"], file).api
    assert found == ("flag-key-1", "env-key-01", "env-key-02", "file-key-1", "file-key-2")
    assert KEYS_VARIABLE not in os.environ
    digests = ApiKeys.of(found).to_environment()
    monkeypatch.setenv(DIGESTS_VARIABLE, digests[DIGESTS_VARIABLE])
    assert not set(child_environment()) & {KEYS_VARIABLE, DIGESTS_VARIABLE, "EXPERTMESH_API_KEY"}
    keys = ApiKeys.from_environment()
    assert DIGESTS_VARIABLE not in os.environ
    for key in found:
        keys.check(key)
    for key in (None, "", "file-key-3"):
        with pytest.raises(AuthenticationError):
            keys.check(key)


def test_admin_keys_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from sources of their own, and get to no child but the gateway, as digests."""
    file = tmp_path / "keys"
    file.write_text("admin-key-1\n")
    monkeypatch.setenv(KEYS_VARIABLE, "user-key-1")
    monkeypatch.setenv(ADMIN_KEYS_VARIABLE, "admin-key-2")
    given = collect_keys(admin_file=file)
    assert (given.api, given.admin) == (("user-key-1",), ("admin-key-2", "admin-key-1"))
    assert "admin" not in repr(given)
    environment = given.to_environment()
    assert environment[ADMIN_DIGESTS_VARIABLE].count(",") == 0  # that of the file it reads itself
    assert set(environment) == {DIGESTS_VARIABLE, ADMIN_DIGESTS_VARIABLE}
    monkeypatch.setenv(ADMIN_DIGESTS_VARIABLE, environment[ADMIN_DIGESTS_VARIABLE])
    monkeypatch.setenv("EXPERTMESH_ADMIN_KEY", "admin-key-1")
    secret = {ADMIN_KEYS_VARIABLE, ADMIN_DIGESTS_VARIABLE, "EXPERTMESH_ADMIN_KEY"}
    assert not set(child_environment()) & secret
    keys = ApiKeys.from_environment(ADMIN_DIGESTS_VARIABLE)
    keys.check("admin-key-2")
    with pytest.raises(AuthenticationError):
        keys.check("user-key-1")


def test_wrong_keys_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short keys, keys with odd letters, files that are not there: named by their source."""
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\n")
    for given, file, named in (
        (["secret!"], None, "--api-key"),
        (["sec ret secret"], None, "--api-key"),
        (["s\xe9cret-secret"], None, "--api-key"),
        ([], tmp_path / "missing", "missing"),
        ([], tmp_path, str(tmp_path)),
        ([], empty, "empty"),
        ([], binary, "not ASCII"),
    ):
        with pytest.raises(SettingsError, match=named) as caught:
            collect_keys(given, file)
        assert "cret" not in str(caught.value)
    monkeypatch.setenv(DIGESTS_VARIABLE, "abc")
    with pytest.raises(SettingsError, match=DIGESTS_VARIABLE):
        ApiKeys.from_environment()


def test_bearer() -> None:
    """Only the scheme Bearer has a key."""
    assert [bearer_key(v) for v in (None, "", "Bearer", "Bearer a", " bearer  a ", "Basic a")] == [
        None, None, "", "a", "a", None,
    ]  # fmt: skip
