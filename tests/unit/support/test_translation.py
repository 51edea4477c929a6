"""README.zh-CN.md says what README.md says: the same sections, commands, names, links, numbers."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"

_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"\s+# .*$", re.MULTILINE)
_FAMILIES = re.compile(r"<!-- families.*<!-- end of families -->", re.DOTALL)


@dataclass(frozen=True)
class Section:
    """What is the same in every language."""

    level: int
    blocks: tuple[str, ...]
    """Code, without comments."""
    names: Counter[str]
    """Code inside of sentences."""
    links: Counter[str]
    """Where they lead, but for headings of the same page and other languages."""
    numbers: Counter[str]
    num_rows: int
    """Of tables."""
    num_items: int
    """Of lists."""


def sections(text: str) -> list[Section]:
    """From heading to heading."""
    blocks = [_COMMENT.sub("", block) for block in _BLOCK.findall(text)]
    bare = _FAMILIES.sub("", _BLOCK.sub("<block>", text))
    return [
        _section(part, blocks) for part in re.split(r"^(?=#+ )", bare, flags=re.MULTILINE) if part
    ]


def _section(part: str, blocks: list[str]) -> Section:
    """A section; takes its blocks from the rest of them."""
    own = tuple(blocks.pop(0) for _ in range(part.count("<block>")))
    targets = re.findall(r"\]\(([^)]+)\)", part)
    links = [target for target in targets if not target.startswith(("#", "README"))]
    names = re.findall(r"`([^`]+)`", part)
    prose = re.sub(r"`[^`]+`|\]\([^)]+\)", "", part)
    return Section(
        level=len(part) - len(part.lstrip("#")),
        blocks=own,
        names=Counter(names),
        links=Counter(links),
        numbers=Counter(re.findall(r"\d+(?:\.\d+)*", prose)),
        num_rows=len(re.findall(r"^\|", part, re.MULTILINE)),
        num_items=len(re.findall(r"^\* ", part, re.MULTILINE)),
    )


def test_translation_is_in_step() -> None:
    """Whoever changes one README changes the other."""
    english, chinese = sections(ENGLISH.read_text()), sections(CHINESE.read_text())
    assert len(english) > 10
    for one, other in zip(english, chinese, strict=True):
        assert one == other


def test_table_of_families_is_the_same() -> None:
    """`make family-table` writes both."""
    (english,), (chinese,) = (_FAMILIES.findall(p.read_text()) for p in (ENGLISH, CHINESE))
    assert english == chinese


def test_languages_link_to_each_other() -> None:
    """At the top."""
    assert f"]({CHINESE.name})" in ENGLISH.read_text()[:200]
    assert f"]({ENGLISH.name})" in CHINESE.read_text()[:200]


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("# A\n\ntext", "# A\n\n## B"),
        ("# A\n```\n$ make run\n```", "# A\n```\n$ make test\n```"),
        ("# A\n`--port`", "# A\n`--ports`"),
        ("# A\n[x](a.md)", "# A\n[x](b.md)"),
        ("# A\n0.97", "# A\n0.98"),
        ("# A\n| a |", "# A\na"),
        ("# A\n* a", "# A\na"),
    ],
)
def test_differences_are_found(text: str, other: str) -> None:
    """Of each kind."""
    assert sections(text) != sections(other)


def test_comments_and_words_may_differ() -> None:
    """They are what a translation is for."""
    one = "# A\nSee [below](#b).\n```\n$ make run   # all of it\n```\n"
    assert sections(one) == sections("# 甲\n见[下文](#乙)。\n```\n$ make run   # 全部\n```\n")
