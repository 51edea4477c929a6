"""Which modules a list of names and patterns means. Lists come from `config.json`: see `check`.

A module is a stored weight's name without `.weight`; experts stacked in one tensor belong to the
module that holds it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

REGEX = "re:"
LINEAR = "Linear"
MAX_PATTERN_LEN = 1000
MAX_REPEATS = 8

_LITERALS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]")
"""Escaped characters and classes: what in them looks like an operator is none."""
_PLAIN_NAME = re.compile(r"[\w.-]*\w")


def module_of(tensor: str) -> str:
    """The module that a weight belongs to."""
    module, _, last = tensor.rpartition(".")
    return module if last == "weight" or module.endswith(".experts") else tensor


def check_pattern(pattern: str) -> str | None:
    """What was expected instead of a pattern that is none, or may take forever to match."""
    if not pattern or len(pattern) > MAX_PATTERN_LEN:
        return f"patterns of 1 to {MAX_PATTERN_LEN} characters"
    bare = _LITERALS.sub("x", pattern)
    if re.search(r"\)[*+{]", bare) or len(re.findall(r"[*+{]", bare)) > MAX_REPEATS:
        return f"patterns of at most {MAX_REPEATS} repeats, and none of a group"
    try:
        re.compile(pattern)
    except re.error as error:
        return f"regular expressions ({error})"
    return None


@dataclass(frozen=True)
class Targets:
    """Names as compressed-tensors understands them: a whole name, `re:` and a pattern from the
    start on, or `Linear` for every matrix."""

    entries: tuple[str, ...]

    def match(self, module: str) -> str | None:
        """The entry that means the module, the most exact one first."""
        if module in self._names:
            return module
        for entry, pattern in self._patterns:
            if pattern.match(module):
                return entry
        return LINEAR if LINEAR in self._names else None

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(entry for entry in self.entries if not entry.startswith(REGEX))

    @cached_property
    def _patterns(self) -> list[tuple[str, re.Pattern[str]]]:
        entries = sorted(entry for entry in self.entries if entry.startswith(REGEX))
        return [(entry, re.compile(entry.removeprefix(REGEX))) for entry in entries]


@dataclass(frozen=True)
class NameParts:
    """Names as transformers understands them: a name or pattern for the module or what holds it,
    or text at its end."""

    entries: tuple[str, ...]

    def match(self, module: str) -> bool:
        """Whether an entry means the module."""
        if module.endswith(self.entries):
            return True
        if any(module[: dot.start()] in self._names for dot in re.finditer(r"\.", module)):
            return True
        return any(pattern.match(module) for pattern in self._patterns)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(entry for entry in self.entries if _PLAIN_NAME.fullmatch(entry))

    @cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        entries = [entry for entry in self.entries if entry not in self._names]
        return [re.compile(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))") for entry in entries]
