"""The pages of docs/ that are made from the code: in step with it, and complete."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from expertmesh.errors import RequestError
from tests.support.expert_metrics import EXPERT_METRICS
from tests.support.metric_families import expert_worker_families
from tests.support.reference import error_rows, errors
from tests.support.reference.configuration import (
    COMMANDS,
    PRIVATE_VARIABLES,
    VARIABLES,
    flags_of,
)
from tests.support.reference.error_rows import ROWS, ErrorRow
from tests.support.reference.errors import answered, grpc_status
from tests.support.reference.markdown import page, table
from tests.support.reference.pages import DOCS, PAGES

ROOT = DOCS.parent
PACKAGES = ("expertmesh", "gateway", "attention_worker", "expert_worker", "kernels")


@pytest.mark.parametrize("name", PAGES)
def test_page_is_in_step(name: str) -> None:
    """Fix: make docs"""
    assert (DOCS / name).read_text() == PAGES[name]()


@pytest.mark.parametrize("name", PAGES)
def test_page_is_linked(name: str) -> None:
    """From the README."""
    assert f"](docs/{name})" in (ROOT / "README.md").read_text()


def test_links_lead_somewhere() -> None:
    """Files and headings of all pages of docs/ and of the READMEs."""
    for path in (*ROOT.glob("README*.md"), *DOCS.glob("*.md")):
        for target, _, heading in _links(path):
            found = path.parent / target if target else path
            assert found.exists(), f"{path.name}: {target}"
            if heading:
                assert heading in _anchors(found), f"{path.name}: {target}#{heading}"


def _links(path: Path) -> Iterator[tuple[str, str, str]]:
    for target in re.findall(r"\]\(([^()\s]+)\)", path.read_text()):
        if "://" not in target:
            yield target.partition("#")


def _anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_bars_do_not_break_a_table() -> None:
    """Nor do ends of lines."""
    assert table(("a",), [("x | y\n z",)]).splitlines()[-1] == r"| x \| y z |"
    assert page("Title", "text").startswith("# Title\n\n<!-- ")


# --- configuration ---


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_a_text_and_a_variable(command: str) -> None:
    """None is left out: the model, the port and the log are among them."""
    flags = {flag.name: flag for flag in flags_of(command)}
    assert {"--model", "--port", "--log-format", "--tls-ca-file"} <= set(flags)
    assert flags["--log-format"].variable == "EXPERTMESH_LOG_FORMAT"
    assert [name for name, flag in flags.items() if len(flag.text) < 20] == []


def test_every_variable_of_the_code_is_listed() -> None:
    """Those that processes hand to their children need not be known."""
    used = {
        name
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for name in re.findall(r'"(EXPERTMESH_[A-Z_]+[A-Z])"', path.read_text())
    }
    flags = {flag.variable for command in COMMANDS for flag in flags_of(command)}
    assert len(used) >= 8
    assert used - flags - set(VARIABLES) == PRIVATE_VARIABLES


# --- errors ---


def _codes() -> Iterator[str]:
    """Those that the code gives to errors: after `code=`, or as an argument of such an error."""
    for package in ("expertmesh", "gateway"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    yield from _codes_of(node)


def _codes_of(call: ast.Call) -> Iterator[str]:
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    arguments = [word.value for word in call.keywords if word.arg == "code"]
    if name in ("ApiError", "BodyError"):
        arguments += call.args[-1:]
    elif name == "_info":
        arguments += call.args[:1]
    elif name == "_unavailable":
        arguments += call.args[1:]
    for argument in arguments:
        for node in ast.walk(argument):
            if isinstance(node, ast.Constant) and re.fullmatch(
                r"[a-z]+(_[a-z]+)+", str(node.value)
            ):
                yield str(node.value)


def test_every_error_code_has_a_row() -> None:
    """And no row is of a code that nobody uses; each has one row."""
    listed = [answered(row).code for row in ROWS]
    assert len(listed) == len(set(listed)) > 25
    assert set(_codes()) - {"not_found"} == set(listed) - {"not_found"}


def test_both_apis_call_it_the_same() -> None:
    """A row cannot say two codes."""
    assert grpc_status(ROWS[0]) == "`INVALID_ARGUMENT`"
    differs = ErrorRow(error_rows.BodyError(400, "", "invalid_body"), "", "")
    with pytest.raises(ValueError, match="INTERNAL_ERROR in gRPC, invalid_body in HTTP"):
        grpc_status(differs)
    assert answered(ErrorRow(RequestError("", code="x"), "", "")).status == 400


def test_all_answers_of_expert_workers_are_listed() -> None:
    """Each code of the proto but the unspecified one."""
    text = errors.errors_page().partition("## Between")[2]
    names = set(re.findall(r"CODE_(\w+) = [1-9]", errors.PROTO.read_text()))
    assert len(names) >= 10
    assert names == set(re.findall(r"\| `(\w+)` \|", text))


# --- metrics ---


def test_names_that_vllm_has_are_there() -> None:
    """With the suffix of a counter, and next to ours."""
    text = (DOCS / "metrics.md").read_text()
    row = next(line for line in text.splitlines() if "`moe_prompt_tokens_total`" in line)
    assert [cell.strip() for cell in row.split("|")][1:5] == [
        "`moe_prompt_tokens_total`", "counter", "`model_name`", "`vllm:prompt_tokens_total`"
    ]  # fmt: skip


def test_expert_workers_have_the_documented_names() -> None:
    """The stand-in has what real ones have."""
    assert {family.name for family in expert_worker_families()} == EXPERT_METRICS
