"""The servers of the conformance tests, each started when a test first asks for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.mesh import Server
from tests.support.strict_client import StrictClient


@pytest.fixture(scope="session")
def client(text_server: Server) -> StrictClient:
    """A mesh of the tiny Mixtral with tokenizer: for all that does not depend on what is said."""
    return StrictClient(text_server.api)


@pytest.fixture(scope="session")
def eos_token_id(text_model: Path) -> int:
    """The token that ends an answer of the tiny Mixtral."""
    from tests.support.tiny_checkpoints import MIXTRAL_TEXT

    return MIXTRAL_TEXT.eos_token_id


_PENDING = Path(__file__).with_name("pending.txt")
"""Tests of what the server does not do yet."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what is pending."""
    pending = set(_PENDING.read_text().split())
    for item in items:
        if item.nodeid.rpartition("/")[2].partition("[")[0] in pending:
            item.add_marker(pytest.mark.skip("not served yet"))
