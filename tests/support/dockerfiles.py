"""Dockerfiles as instructions, read without a container engine."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from tests.support.manifests import DEPLOY

IMAGES = ("gateway", "expert-worker")
_STAGE = re.compile(r"(\S+)(?: AS (\S+))?")


@dataclass
class Stage:
    """One FROM and what follows."""

    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def of(self, word: str) -> list[str]:
        """Arguments of all instructions of this kind."""
        return [text for kind, text in self.instructions if kind == word]


@dataclass
class Dockerfile:
    """One image."""

    arguments: dict[str, str]
    """Defaults of the arguments before the first stage."""
    stages: list[Stage]

    def chain(self, variant: str) -> list[Stage]:
        """The stages that the image of a variant is made of, from its base on."""
        stage = self.stages[-1]
        found = [stage]
        while stage := self._named(self.expanded(stage.base, variant)):
            found.insert(0, stage)
        return found

    def _named(self, name: str) -> Stage | None:
        return next((stage for stage in self.stages if stage.name == name), None)

    def expanded(self, text: str, variant: str) -> str:
        """A text with the arguments in it."""
        values = {**self.arguments, "VARIANT": variant}
        return re.sub(r"\$\{(\w+)\}", lambda name: values[name[1]], text)

    def last(self, variant: str, word: str) -> str:
        """The last instruction of a kind, which is in force."""
        found = [text for stage in self.chain(variant) for text in stage.of(word)]
        assert found, f"no {word}"
        return found[-1]


def source(name: str) -> str:
    """The text of a Dockerfile."""
    return (DEPLOY / "images" / f"{name}.Dockerfile").read_text()


def read(text: str) -> Dockerfile:
    """The instructions of a Dockerfile."""
    plain = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for line in filter(None, plain.replace("\\\n", " ").splitlines()):
        word, _, rest = line.strip().partition(" ")
        rest = " ".join(rest.split())
        if word == "FROM":
            parts = _STAGE.fullmatch(rest)
            assert parts is not None, line
            stages.append(Stage(parts[1], parts[2] or ""))
        elif stages:
            stages[-1].instructions.append((word, rest))
        else:
            assert word == "ARG", line
            name, _, value = rest.partition("=")
            arguments[name] = value
    return Dockerfile(arguments, stages)


def exec_form(text: str) -> list[str]:
    """The words of a command in JSON; fails for one that a shell would run."""
    assert text.startswith("["), f"{text} is for a shell"
    words = json.loads(text)
    assert all(isinstance(word, str) for word in words)
    return list(words)
