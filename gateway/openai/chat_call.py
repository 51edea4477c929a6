"""A chat request made ready for the engine; every endpoint that is a chat starts here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from expertmesh.errors import RequestError
from gateway.generation_options import OutputLimit
from gateway.openai.prompts import TokenIds, check_together, encode_chat, truncation_of
from gateway.openai.schema import ChatRequest, parse_chat
from gateway.option_checks import check_options
from gateway.service import GenerationFrontend, ServedModel
from gateway.structured.constraint import Constraint, Kind, parse_constraint
from gateway.structured.grammar import compile_constraint
from gateway.tools.constraints import content_or_calls, tool_constraint
from gateway.tools.definitions import Choice, ToolUse, parse_tool_use
from gateway.tools.readers import Reader


@dataclass(frozen=True)
class ChatCall:
    """A checked request, its prompt and its grammar."""

    model: ServedModel
    body: ChatRequest
    tools: ToolUse
    prompt: TokenIds
    limit: OutputLimit
    grammar: str

    def reader(self) -> Reader:
        """Finds the tool calls of one answer."""
        return self.model.tool_format.reader(self.tools)


async def prepare_chat(frontend: GenerationFrontend, fields: Mapping[str, object]) -> ChatCall:
    """Checks a request, encodes its prompt and compiles its grammar.

    Args:
        frontend: Has the model.
        fields: Body of a chat request.

    Raises:
        RequestError: Names the parameter that is wrong.
    """
    model = frontend.model
    body = parse_chat(fields, model)
    check_options(body, model.bounds)
    tools = parse_tool_use(fields)
    constraint = parse_constraint(fields)
    limit = _limit(body)
    truncation = truncation_of(body, model, limit.requested)
    prompt = await encode_chat(
        frontend,
        body.messages,
        truncation=truncation,
        tools=tools.offered,
        options=body.template_options(),
    )
    check_together([prompt], body.n or 1, frontend.limits.max_prompt_tokens, "messages")
    if tools.choice is Choice.AUTO and model.tool_format.needs_special_tokens:
        body.skip_special_tokens = False
    if constraint is not None and tools.choice is Choice.AUTO:
        await compile_constraint(frontend, constraint)  # its own mistakes have its own name
        constraint = _content_or_calls(model, tools, constraint)
    # Calls that must be made come before a format of the content.
    grammar = await compile_constraint(frontend, tool_constraint(tools) or constraint)
    return ChatCall(model, body, tools, prompt, limit, grammar)


def _limit(body: ChatRequest) -> OutputLimit:
    replaced = body.max_completion_tokens is not None
    return OutputLimit(
        requested=body.max_completion_tokens if replaced else body.max_tokens,
        default=None,
        param="max_completion_tokens" if replaced else "max_tokens",
        prompt_param="messages",
    )


def _content_or_calls(model: ServedModel, tools: ToolUse, content: Constraint) -> Constraint:
    tags = model.tool_format.tags
    if content.kind is Kind.JSON_SCHEMA and tags is not None:
        return content_or_calls(tools, content, tags)
    raise RequestError(
        f"{content.param} and tools that the model may choose exclude each other here; leave one "
        "out, or let tool_choice be none, required or a tool",
        param=content.param,
        code="unsupported_by_model" if tags is None else "invalid_value",
    )
