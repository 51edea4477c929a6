"""Real Python clients against the demo model on a mesh: openai, anthropic, langchain, llm, gRPC."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest
import yaml
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr

from tests.support.api import Json
from tests.support.demo_clients import ANSWER, ASKED, MODEL, QUESTION, TOOL, WEATHER, run
from tests.support.mesh import Server, serve
from tests.support.processes import ROOT

GREEDY = {"temperature": 0}
"""Of Anthropic's API, but no longer of its client."""


class City(BaseModel):
    """What is asked for in structured answers."""

    name: str = Field(max_length=12)
    population: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    """The demo model with two expert workers."""
    with serve("demo", dtype="bfloat16") as server:
        yield server


@pytest.fixture(scope="module")
def url(demo: Server) -> str:
    """Base URL, as OpenAI's clients take it."""
    return f"http://127.0.0.1:{demo.api.port}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def claude(demo: Server) -> Iterator[anthropic.Anthropic]:
    """Anthropic's own client."""
    url = f"http://127.0.0.1:{demo.api.port}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def chat_model(url: str) -> ChatOpenAI:
    """LangChain's model."""
    return ChatOpenAI(
        model=MODEL, base_url=url, api_key=SecretStr("none"), temperature=0, max_retries=0
    )


def test_openai_models(client: openai.OpenAI) -> None:
    """The model is listed and can be looked up."""
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL) == model


def test_openai_chat(client: openai.OpenAI) -> None:
    """A whole answer, with the id of its request."""
    answer = client.chat.completions.create(
        model=MODEL, messages=ASKED, temperature=0, max_completion_tokens=16
    )
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer._request_id


def test_openai_stream(client: openai.OpenAI) -> None:
    """The helper for streams puts text and usage together."""
    with client.chat.completions.stream(
        model=MODEL, messages=ASKED, temperature=0, stream_options={"include_usage": True}
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        answer = stream.get_final_completion()
    assert "".join(deltas) == answer.choices[0].message.content == ANSWER
    assert len(deltas) > 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_openai_completions(client: openai.OpenAI) -> None:
    """The older endpoint, with log probabilities."""
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=2, logprobs=2
    )
    assert answer.choices[0].text == " Paris."
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == [" Paris", "."]


def test_openai_parse(client: openai.OpenAI) -> None:
    """A structured answer comes back as an object of a Pydantic class."""
    answer = client.chat.completions.parse(
        model=MODEL, messages=ASKED, temperature=0, max_tokens=60, response_format=City
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def test_openai_tools(client: openai.OpenAI) -> None:
    """A required tool is called with arguments that follow its schema."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "How is the weather in Rome?"}],
        tools=[TOOL],
        tool_choice="required",
        temperature=0,
        max_tokens=60,
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert call.function.arguments.replace(" ", "") in ('{"city":"Rome"}', '{"city":"Paris"}')


def test_openai_responses(client: openai.OpenAI) -> None:
    """The Responses API, whole and streamed."""
    fields: Json = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 16}
    assert client.responses.create(**fields).output_text == ANSWER
    with client.responses.stream(**fields) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().status == "completed"
    assert "".join(deltas) == ANSWER


def test_openai_errors(client: openai.OpenAI) -> None:
    """Errors become the exceptions that people catch, with code and parameter."""
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nothing", messages=ASKED)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=ASKED, temperature=9)
    assert bad.value.param == "temperature"
    assert bad.value.request_id


async def test_openai_async(url: str) -> None:
    """Several answers at once, whole and streamed, are each the one given alone."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

        async def streamed() -> str:
            stream = await client.chat.completions.create(
                model=MODEL, messages=ASKED, temperature=0, max_tokens=16, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async def whole() -> str:
            answer = await client.chat.completions.create(
                model=MODEL, messages=ASKED, temperature=0, max_tokens=16
            )
            return answer.choices[0].message.content or ""

        answers = await asyncio.gather(streamed(), whole(), streamed(), whole())
    assert set(answers) == {ANSWER}


def test_anthropic(claude: anthropic.Anthropic) -> None:
    """A message, whole and streamed, and the number of its tokens."""
    fields: Json = {"model": MODEL, "messages": ASKED}
    limits: Json = {"max_tokens": 16, "extra_body": GREEDY}
    answer = claude.messages.create(**fields, **limits)
    assert answer.content[0].type == "text"
    assert answer.content[0].text == ANSWER
    assert answer.stop_reason == "end_turn"
    with claude.messages.stream(**fields, **limits) as stream:
        assert "".join(stream.text_stream) == ANSWER
        assert stream.get_final_message().usage.output_tokens == answer.usage.output_tokens
    counted = claude.messages.count_tokens(**fields)
    cached = answer.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == answer.usage.input_tokens + cached


def test_anthropic_tools(claude: anthropic.Anthropic) -> None:
    """A tool that must be used is used."""
    answer = claude.messages.create(
        model=MODEL,
        max_tokens=60,
        extra_body=GREEDY,
        messages=[{"role": "user", "content": "How is the weather in Rome?"}],
        tools=[{"name": "get_weather", "input_schema": WEATHER}],
        tool_choice={"type": "tool", "name": "get_weather"},
    )
    assert answer.stop_reason == "tool_use"
    use = answer.content[-1]
    assert use.type == "tool_use"
    assert use.input in ({"city": "Rome"}, {"city": "Paris"})


def test_anthropic_errors(claude: anthropic.Anthropic) -> None:
    """Errors become the exceptions that people catch."""
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="nothing", max_tokens=4, messages=ASKED)
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(model=MODEL, max_tokens=0, messages=ASKED)


def test_langchain(chat_model: ChatOpenAI) -> None:
    """Whole, streamed, and several at once."""
    assert chat_model.invoke(QUESTION).content == ANSWER
    assert "".join(str(chunk.content) for chunk in chat_model.stream(QUESTION)) == ANSWER
    answers = chat_model.batch([QUESTION, QUESTION])
    assert [answer.content for answer in answers] == [ANSWER, ANSWER]


def test_langchain_structured(chat_model: ChatOpenAI) -> None:
    """Structured output and tools."""
    city = chat_model.with_structured_output(City, method="json_schema").invoke(QUESTION)
    assert isinstance(city, City)
    with_tool = chat_model.bind_tools([TOOL], tool_choice="get_weather")
    answer = with_tool.invoke("How is the weather in Rome?")
    assert isinstance(answer, AIMessage)
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather"
    assert call["args"]["city"] in ("Rome", "Paris")


@pytest.mark.parametrize("flags", [[], ["--no-stream"]])
def test_llm_command(url: str, tmp_path: Path, flags: list[str]) -> None:
    """The command `llm`, with the model in its configuration file."""
    model = {"model_id": "mesh", "model_name": MODEL, "api_base": url}
    (tmp_path / "extra-openai-models.yaml").write_text(yaml.safe_dump([model]))
    command = [
        sys.executable,
        "-m",
        "llm",
        "-m",
        "mesh",
        "-o",
        "temperature",
        "0",
        *flags,
        QUESTION,
    ]
    env = {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    assert run(command, env=env).strip() == ANSWER


_GRPC_CLIENT = f"""
import sys
import grpc
from expertmesh.v1 import generation_service_pb2 as pb
from expertmesh.v1 import generation_service_pb2_grpc as rpc

with grpc.insecure_channel(sys.argv[1]) as channel:
    stub = rpc.GenerationServiceStub(channel)
    request = pb.GenerateRequest(
        conversation=pb.Conversation(
            messages=[pb.ChatMessage(role="user", content={QUESTION!r})]
        ),
        sampling=pb.SamplingOptions(temperature=0),
        stopping=pb.StoppingOptions(max_tokens=16),
    )
    print("".join(piece.text for piece in stub.Generate(request, timeout=60)))
"""


def test_grpc_client(demo: Server, tmp_path: Path) -> None:
    """A client that has nothing of ours but the proto, from which it generates its code."""
    proto = "expertmesh/v1/generation_service.proto"
    out = [f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}"]
    run([sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "proto"), *out, proto])
    (tmp_path / "client.py").write_text(_GRPC_CLIENT)
    address = f"127.0.0.1:{demo.grpc_port}"
    command = [sys.executable, str(tmp_path / "client.py"), address]
    env = {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    assert run(command, env=env).strip() == ANSWER
