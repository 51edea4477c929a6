"""Requests with two tools, as tests of tools need them."""

from __future__ import annotations

from typing import Any

from llguidance import LLTokenizer

from gateway.tools.definitions import ToolUse, parse_tool_use
from tests.support.scripted_engine import byte_tokenizer

TOKENIZER = byte_tokenizer()
VOCABULARY = LLTokenizer(TOKENIZER.definition, eos_token=TOKENIZER.eos_ids[0])

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a town",
        "parameters": {
            "type": "object",
            "properties": {"town": {"$ref": "#/$defs/town"}},
            "required": ["town"],
            "additionalProperties": False,
            "$defs": {"town": {"enum": ["Köln", "Rome"]}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "weather?"}],
    "tools": [WEATHER, CLOCK],
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"town": "Köln"}}\n</tool_call>'


def use_of(**fields: object) -> ToolUse:
    """Tools of a request."""
    return parse_tool_use({"tools": [WEATHER, CLOCK], **fields})


def function(**fields: object) -> dict[str, object]:
    """A request with one tool."""
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}
