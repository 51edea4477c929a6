"""The items of a response's output."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.openai.logprobs import Json
from gateway.service import new_id


@dataclass
class MessageItem:
    """Text of the assistant."""

    text: str = ""
    status: str = "in_progress"
    item_id: str = field(default_factory=lambda: new_id("msg_"))

    def part(self) -> Json:
        """Its only part."""
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def shown(self, *, empty: bool = False) -> Json:
        """The item as it is now, or as it was before its part began."""
        return {
            "type": "message",
            "id": self.item_id,
            "status": self.status,
            "role": "assistant",
            "content": [] if empty else [self.part()],
        }


@dataclass
class CallItem:
    """A tool call."""

    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"
    item_id: str = field(default_factory=lambda: new_id("fc_"))

    def shown(self) -> Json:
        """The item as it is now."""
        return {
            "type": "function_call",
            "id": self.item_id,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments,
            "status": self.status,
        }


Item = MessageItem | CallItem
