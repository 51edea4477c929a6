"""`expertmesh chat` and `complete`, against a scripted HTTP server."""

from __future__ import annotations

import http.server
import io
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from expertmesh.errors import PeerError, StartupError
from gateway.command.cli import run_command
from gateway.command.client_commands import ClientOptions, answer, run_chat, run_complete


def _event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _delta(text: str) -> bytes:
    return _event({"choices": [{"index": 0, "delta": {"content": text}}]})


USAGE = _event({"choices": [], "usage": {"completion_tokens": 3}})
DONE = b"data: [DONE]\n\n"


@dataclass
class Scripted:
    """A server that answers POST with `body`, and remembers what it was asked."""

    status: int = 200
    body: bytes = b""
    requests: list[dict[str, object]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    url: str = ""

    @property
    def options(self) -> ClientOptions:
        """Options that lead here."""
        return ClientOptions(self.url)


@pytest.fixture
def server() -> Iterator[Scripted]:
    """A scripted server on a free port."""
    script = Scripted()

    class Handler(http.server.BaseHTTPRequestHandler):
        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self._answer(200, b'{"data": [{"id": "demo"}, {"id": "other"}]}')

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            script.requests.append({"path": self.path, **request})
            script.headers = dict(self.headers)
            self._answer(script.status, script.body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    listener = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    script.url = f"http://127.0.0.1:{listener.server_address[1]}"
    thread = threading.Thread(target=listener.serve_forever, name="scripted-server")
    thread.start()
    yield script
    listener.shutdown()
    thread.join(5)
    listener.server_close()


def test_chat(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    """Text is streamed to standard output, times to standard error."""
    server.body = b": keep-alive\n\n" + _delta("Par") + _delta("is") + USAGE + DONE

    assert run_chat("Capital?", "Be brief.", server.options) == 0

    written = capsys.readouterr()
    assert written.out == "Paris\n"
    assert written.err.startswith("[TTFT ")
    assert ", 3 tokens, " in written.err
    assert written.err.endswith(" tok/s]\n")
    (request,) = server.requests
    assert request["path"] == "/v1/chat/completions"
    assert request["model"] == "demo"
    assert request["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Capital?"},
    ]
    assert "temperature" not in request


def test_complete(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    """The prompt is shown with what follows it; options reach the server."""
    server.body = _event({"choices": [{"index": 0, "text": " upon"}]}) + USAGE + DONE
    options = ClientOptions(server.url, "other", 5, 0.0, 7, "secret")

    assert run_complete("Once", options) == 0

    assert capsys.readouterr().out == "Once upon\n"
    (request,) = server.requests
    expected = {"model": "other", "max_tokens": 5, "temperature": 0.0, "seed": 7, "prompt": "Once"}
    assert expected.items() <= request.items()
    assert server.headers["Authorization"] == "Bearer secret"
    assert "secret" not in repr(options)


def test_dialogue(
    server: Scripted, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a message, lines of standard input are a dialogue that remembers the answers."""
    server.body = _delta("Hi") + USAGE + DONE
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))

    assert run_chat(None, None, server.options) == 0

    assert capsys.readouterr().out == "Hi\nHi\n"
    assert server.requests[1]["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "two"},
    ]


def test_error_of_the_server(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    """The message of the error envelope is shown in one line, exit code 1."""
    server.status = 404
    server.body = b'{"error": {"message": "no model x", "type": "t", "param": null, "code": "c"}}'

    assert run_command(["chat", "hi", "--url", server.url]) == 1

    assert capsys.readouterr().err == "error: the server answered 404: no model x\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_delta("Hi") + _event({"error": {"message": "expert lost"}}) + DONE, "expert lost"),
        (_delta("Hi"), "closed the connection before the answer was complete"),
    ],
)
def test_broken_answers(server: Scripted, body: bytes, message: str) -> None:
    """An error in the stream, or an answer without its end, is not taken for a whole one."""
    server.body = body

    with pytest.raises(PeerError, match=message):
        answer([{"role": "user", "content": "x"}], server.options)


def test_no_server() -> None:
    """Where nobody listens, the error says how to get a server."""
    with pytest.raises(StartupError, match="no server answers at") as caught:
        answer([], ClientOptions("http://127.0.0.1:1"))

    assert "expertmesh serve" in caught.value.fix


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://"])
def test_url_that_is_none(url: str) -> None:
    """An address without scheme or host is refused."""
    with pytest.raises(StartupError, match="expected http://host:port"):
        answer([], ClientOptions(url))
