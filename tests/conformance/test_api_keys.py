"""A server that wants keys, over HTTP and with the clients that send them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anthropic
import grpc
import openai
import pytest

from expertmesh.v1 import generation_service_pb2 as pb
from expertmesh.v1 import generation_service_pb2_grpc as rpc
from tests.support.mesh import Server, serve
from tests.support.processes import poll, processes_of
from tests.support.strict_client import CHAT, HELLO, StrictClient, chat_body, error_of

KEYS = ("key-of-alice", "key-of-bob")


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a key."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"{KEYS[0]}\n")
    return path


@pytest.fixture(scope="module")
def server(text_model: Path, key_file: Path) -> Iterator[Server]:
    """Two keys, one in a file and one in the environment; a question of ours at the start."""
    flags = ("--api-key-file", str(key_file), "--ask", "Who are you?")
    env = {"EXPERTMESH_API_KEYS": f"sk-other-000000, {KEYS[1]}"}
    with serve(text_model, *flags, expert_workers=0, env=env) as server:
        yield server


def test_keys_stay_secret(server: Server) -> None:
    """Our own question had a key; no process, answer or log shows one."""
    process = server.process
    assert "API key" not in process.stdout + process.stderr
    info = server.api.request("GET", "/server_info", headers=_bearer())
    assert info.status == 200
    shown = [info.body.decode(), process.stdout, process.stderr]
    for each in processes_of(process.marker):
        shown.append(" ".join(each.cmdline()))
        if "attention_worker" in each.cmdline():
            assert not [name for name in each.environ() if "API_KEY" in name]
    assert not [key for key in KEYS for text in shown if key in text]


@pytest.mark.parametrize("header", [None, "Bearer wrong", "key-of-alice", "Basic key-of-alice"])
def test_refused(server: Server, header: str | None) -> None:
    """401 in the envelope, with the header that says what is expected."""
    headers = {} if header is None else {"Authorization": header}
    client = StrictClient(server.api, headers)
    for answer in (client.post(CHAT, chat_body()), client.post("/tokenize", {"prompt": "x"})):
        error = error_of(answer, 401)
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize("key", KEYS)
def test_served(server: Server, key: str) -> None:
    """Every key opens everything, whole and streamed."""
    client = StrictClient(server.api, {"Authorization": f"Bearer {key}"})
    assert client.chat()["choices"]
    assert client.chat_stream()


def test_a_file_that_changes(server: Server, key_file: Path) -> None:
    """A key that comes into it is served while the server runs, and refused when it is gone."""

    def is_served() -> bool:
        headers = {"Authorization": "Bearer key-of-carol"}
        return server.api.request("GET", "/v1/models", headers=headers).status == 200

    assert not is_served()
    _replace(key_file, KEYS[0], "key-of-carol")
    poll(is_served, timeout_s=30, what="the new key is accepted")
    _replace(key_file, KEYS[0])
    poll(lambda: not is_served(), timeout_s=30, what="it is refused again")
    assert StrictClient(server.api, _bearer()).chat()["choices"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version", "/ping"])
def test_open_to_machines(server: Server, path: str) -> None:
    """Probes and scrapers need no key."""
    assert server.api.get(path).status == 200


def test_openai(server: Server) -> None:
    """The key of OpenAI's client."""
    url = f"http://127.0.0.1:{server.api.port}/v1"
    with openai.OpenAI(base_url=url, api_key=KEYS[0], max_retries=0) as client:
        name = client.models.list().data[0].id
    with (
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.retrieve(name)


def test_anthropic(server: Server) -> None:
    """The key of Anthropic's client, which is in another header; errors are in its own form."""
    url = f"http://127.0.0.1:{server.api.port}"
    fields = {"model": StrictClient(server.api, _bearer()).chat()["model"], "messages": HELLO}
    with anthropic.Anthropic(base_url=url, api_key=KEYS[1], max_retries=0) as client:
        assert client.messages.create(**fields, max_tokens=4).usage.output_tokens <= 4
    with (
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError) as refused,
    ):
        client.messages.create(**fields, max_tokens=4)
    assert refused.value.body["error"]["type"] == "authentication_error"


def _replace(path: Path, *keys: str) -> None:
    new = path.with_suffix(".new")
    new.write_text("\n".join(keys))
    new.replace(path)


def _bearer() -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[0]}"}


def test_grpc(server: Server) -> None:
    """The same keys in the metadata."""
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = rpc.GenerationServiceStub(channel)
        request = pb.TokenizeRequest(text="fox")
        with pytest.raises(grpc.RpcError) as refused:
            stub.Tokenize(request, timeout=10)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        metadata = [("authorization", f"Bearer {KEYS[0]}")]
        assert stub.Tokenize(request, metadata=metadata, timeout=10).token_ids
