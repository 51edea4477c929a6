"""Tool calls in generated text: each format, whole and in pieces, and what only looks like one."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tools.events import (
    CallArguments,
    CallStart,
    Event,
    EventWriter,
    TextDelta,
    collect,
    long_id,
    short_id,
)
from gateway.tools.readers import (
    ArgumentsReader,
    HermesReader,
    LeadingReader,
    LetterReader,
    MistralReader,
    PlainReader,
    Reader,
)

NAMES = frozenset({"f", "get.weather-2"})
MARKED = (HermesReader, MistralReader, LeadingReader)

Seen = tuple[str, list[tuple[str, str]]]
"""Content, and (name, arguments) of each call."""


def read(make: Callable[[], Reader], pieces: list[str]) -> list[Event]:
    """All events of a text that comes in pieces."""
    reader = make()
    events = [event for piece in pieces for event in reader.push(piece)]
    return events + reader.finish()


def seen(events: list[Event]) -> Seen:
    """What events say, without ids, which are random."""
    message = collect(events)
    return message.content, [(call.name, call.arguments) for call in message.calls]


def reader(kind: type[LetterReader], max_calls: int | None = None) -> Callable[[], Reader]:
    """Makes readers of a kind."""
    return lambda: kind(NAMES, EventWriter(max_calls=max_calls))


F1 = '{"name": "f", "arguments": {"a": 1}}'
G = '{"name": "get.weather-2", "arguments": {}}'
QUOTES = r'{"name": "f", "arguments": {"a": "}]</tool_call>\"\\", "b": [{}, "é"]}}'
CALLS: list[tuple[type[LetterReader], str, Seen]] = [
    (HermesReader, f"<tool_call>\n{F1}\n</tool_call>", ("", [("f", '{"a": 1}')])),
    (
        HermesReader,
        f"Let me see. \n<tool_call>{F1}</tool_call>\n<tool_call>{G}</tool_call>\nDone. ",
        ("Let me see.\nDone.", [("f", '{"a": 1}'), ("get.weather-2", "{}")]),
    ),
    (
        HermesReader,
        f"<tool_call>{QUOTES}</tool_call>",
        ("", [("f", r'{"a": "}]</tool_call>\"\\", "b": [{}, "é"]}')]),
    ),
    (
        HermesReader,
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        ("", [("f", '{"a": 1}')]),
    ),
    (
        HermesReader,
        r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>',
        ("", [("f", '{"a": 1}')]),
    ),
    (HermesReader, '<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
    (HermesReader, '<tool_call>{"name":"f","arguments":null}</tool_call>', ("", [("f", "{}")])),
    (
        HermesReader,
        '<tool_call>{"id": 7, "name": "f", "parameters": {}, "type": "x"}</tool_call>',
        ("", [("f", "{}")]),
    ),
    (HermesReader, f"<tool_call>{F1}\n{G}", ("", [("f", '{"a": 1}'), ("get.weather-2", "{}")])),
    (HermesReader, f"<tool_call>{F1}<tool_call>{F1}", ("", [("f", '{"a": 1}')] * 2)),
    (HermesReader, f"<tool_call>{F1[:-3]}", ("", [("f", '{"a": ')])),
    (HermesReader, f"<tool_call>{F1}</tool_c", ("", [("f", '{"a": 1}')])),
    (HermesReader, f"<tool_call><tool_call>{F1}", ("<tool_call>", [("f", '{"a": 1}')])),
    (
        HermesReader,
        '<tool_call>{"name": "f", "arguments": {"a": 1]} end',
        ("]} end", [("f", '{"a": 1')]),
    ),
    (
        MistralReader,
        f"[TOOL_CALLS] [{F1}, {G}]",
        ("", [("f", '{"a": 1}'), ("get.weather-2", "{}")]),
    ),
    (MistralReader, f"Hm. [TOOL_CALLS]{F1}", ("Hm.", [("f", '{"a": 1}')])),
    (
        MistralReader,
        '[TOOL_CALLS]f{"a": "[TOOL_CALLS]"}[TOOL_CALLS]get.weather-2[ARGS]{}'
        "[TOOL_CALLS]f[CALL_ID]x[ARGS]{}",
        ("", [("f", '{"a": "[TOOL_CALLS]"}'), ("get.weather-2", "{}"), ("f", "{}")]),
    ),
    (
        MistralReader,
        f'[TOOL_CALLS][{F1}, {{"name": "unknown"}}]',
        (', {"name": "unknown"}]', [("f", '{"a": 1}')]),
    ),
    (LeadingReader, '{"name": "f", "parameters": {"a": 1}}', ("", [("f", '{"a": 1}')])),
    (
        LeadingReader,
        f"\n<|python_tag|>{F1}; {G}\n",
        ("", [("f", '{"a": 1}'), ("get.weather-2", "{}")]),
    ),
    (LeadingReader, f"[{F1},\n {G}]", ("", [("f", '{"a": 1}'), ("get.weather-2", "{}")])),
    (LeadingReader, f"{F1} and text", ("and text", [("f", '{"a": 1}')])),
]


@pytest.mark.parametrize(("kind", "text", "expected"), CALLS)
def test_calls_are_found(kind: type[LetterReader], text: str, expected: Seen) -> None:
    """Each format, in all the variants that models write; layout around calls is no content."""
    assert seen(read(reader(kind), [text])) == expected


@pytest.mark.parametrize(("kind", "text", "expected"), CALLS)
def test_pieces_make_no_difference(kind: type[LetterReader], text: str, expected: Seen) -> None:
    """Cut in two at every place, and letter by letter, a text says the same."""
    for cut in range(len(text) + 1):
        assert seen(read(reader(kind), [text[:cut], text[cut:]])) == expected
    assert seen(read(reader(kind), list(text))) == expected


NO_CALLS = [
    "",
    " \n",
    "Hello <b>world</b> [1] {2} ",
    "<tool_call>not JSON</tool_call>",
    "<tool_call>",
    "<tool_call>[1]</tool_call>",
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
    '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "argum',
    '<tool_call>{"name": "f" "arguments": {}}',
    '<tool_call>{name: "f"}</tool_call>',
    "<tool_cal",
    "[TOOL_CALLS]",
    "[TOOL_CALLS]unknown{}",
    "[TOOL_CALLS]f[ARGX]{}",
    "[TOOL_CALLS][]",
    "[TOOL_CALLS]" + "f" * 1000,
    "[TOOL_CALLS][1, 2]",
    '{"temperature": 3}',
    "[1, 2, 3]",
    "{",
    "<|python_tag|>search.call(query='x')",
    "<|python",
    '{"name": "unknown", "parameters": {}}',
]


@pytest.mark.parametrize("kind", MARKED)
@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_is_content(kind: type[LetterReader], text: str) -> None:
    """Text that begins like a call, and is none, arrives letter by letter as it was written."""
    assert seen(read(reader(kind), [text])) == (text, [])
    assert seen(read(reader(kind), list(text))) == (text, [])


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "<tool_"),
        *(F1, G, QUOTES, '{"name": "f", "arguments": {', '"x": 1', "}", "]", "[", ",", '"', "\\"),
        *(" ", "\n", "f", "text", "é", "{", ":", '{"name": "unknown"}', ";"),
    ]
)


@given(text=st.lists(PIECES, max_size=8).map("".join), data=st.data())
def test_any_text_reads_the_same_in_any_pieces(text: str, data: st.DataObject) -> None:
    """Streaming and not streaming give the same answer, whatever a model writes; every letter but
    those of the format is in it."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for kind in MARKED:
        whole = seen(read(reader(kind), [text]))
        assert seen(read(reader(kind), pieces)) == whole
        assert seen(read(reader(kind), list(text))) == whole
        if not whole[1]:
            assert whole[0] == text


def test_deltas_come_as_a_client_expects_them() -> None:
    """A call starts with its name, arguments follow in pieces, a marker is held back until it is
    one."""
    found = reader(HermesReader)()
    assert found.push("Hi <tool") == [TextDelta("Hi")]
    assert found.push('_call>{"name": "f", "arguments": ') == []
    start, arguments = found.push('{"a"')
    assert isinstance(start, CallStart)
    assert (start.index, start.name) == (0, "f")
    assert arguments == CallArguments(0, '{"a"')
    assert found.push(': 1}}</tool_call>\n<tool_call>{"na') == [CallArguments(0, ": 1}")]
    assert found.num_calls == 1
    second, arguments = found.push('me": "f", "arguments": {}}')
    assert isinstance(second, CallStart)
    assert second.index == 1
    assert second.call_id != start.call_id
    assert arguments == CallArguments(1, "{}")
    assert found.finish() == []


def test_parallel_calls_can_be_left_out() -> None:
    """With at most one call, others vanish and the rest stays."""
    text = f"a<tool_call>{F1}</tool_call><tool_call>{G}</tool_call>b"
    assert seen(read(reader(HermesReader, 1), list(text))) == ("a\nb", [("f", '{"a": 1}')])


def test_other_readers() -> None:
    """Without tools all is content; with a named tool all is arguments."""
    assert read(PlainReader, ["<tool_call>", "", " x "]) == [
        TextDelta("<tool_call>"),
        TextDelta(" x "),
    ]
    events = read(lambda: ArgumentsReader("f", EventWriter()), ["", '{"a"', ": 1}"])
    assert isinstance(events[0], CallStart)
    assert events[1:] == [CallArguments(0, '{"a"'), CallArguments(0, ": 1}")]
    assert read(lambda: ArgumentsReader("f", EventWriter()), [""]) == []


def test_ids_are_unique() -> None:
    """Ids have the form that clients and templates expect, and do not repeat."""
    assert len({long_id() for _ in range(1000)} | {short_id() for _ in range(1000)}) == 2000
    assert all(len(short_id()) == 9 and short_id().isalnum() for _ in range(100))


@pytest.mark.parametrize("kind", MARKED)
def test_long_texts_take_time_in_proportion(kind: type[LetterReader]) -> None:
    """Nothing is looked at again and again: nearly calls by the thousand are read in a moment."""
    text = (
        "<tool_call" * 8_000 + "[" * 30_000 + '{"name": "f", "arguments": {"a": "' + "x" * 100_000
    )
    content, calls = seen(read(reader(kind), [text]))
    assert len(content) + sum(len(json.dumps(call)) for call in calls) >= 100_000
