"""Chat templates that show tools as those of well-known models do, and a model that has one."""

from __future__ import annotations

from dataclasses import replace

from gateway.service import ServedModel
from gateway.text.chat_template import ChatTemplate
from tests.support.scripted_engine import CHATML, served_model

HERMES = (
    "{% if tools %}<|im_start|>system\nWrite <tool_call> and JSON.{% for tool in tools %}"
    "\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for message in messages %}{% if message.tool_calls %}"
    "[TOOL_CALLS]{% for call in message.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    "{{ call.function | tojson }}{% endfor %}"
    "{% else %}[{{ message.role }}]{{ message.content }}{% endif %}{% endfor %}"
)
LLAMA = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}"
    'Answer {"name": function name, "parameters": dictionary}{% endif %}'
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}[ipython]{{ message.content }}"
    "{% elif message.tool_calls %}"
    "{% if message.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{{ message.tool_calls[0].function | tojson }}"
    "{% else %}[{{ message.role }}]{{ message.content }}{% endif %}{% endfor %}"
)
XML = HERMES.replace("JSON", "<function=NAME>")
"""Shows tools, but in a format that is not known here."""
NO_SYSTEM = (
    "{% for message in messages %}"
    "{% if message.role not in ('user', 'assistant') %}{{ raise_exception('no such role') }}"
    "{% elif (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}{% endfor %}"
)
PLAIN = CHATML

CONTEXT = 8192


def tool_model(template: str = HERMES) -> ServedModel:
    """The model of the tests with this chat template, and room for tools."""
    model = served_model()
    assert model.tokenizer is not None, "it has one"
    chat_template = ChatTemplate(template, model.tokenizer)
    return replace(model, chat_template=chat_template, max_model_len=CONTEXT)
