"""The servers of the conformance tests, each started when a test first asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support.mesh import serve
from tests.support.strict_client import CONTEXT_LEN, StrictClient

if TYPE_CHECKING:
    from tests.conftest import Models


@pytest.fixture(scope="session")
def client(models: Models) -> Iterator[StrictClient]:
    """A mesh of a tiny Mixtral with a tokenizer: for all that does not depend on what is said."""
    from tests.support.tiny_checkpoints import MIXTRAL_TEXT

    shape = replace(MIXTRAL_TEXT, max_positions=CONTEXT_LEN)
    with serve(models.tiny(shape, tokenizer=True)) as server:
        yield StrictClient(server.api)


@pytest.fixture(scope="session")
def eos_token_id() -> int:
    """The token that ends an answer of the tiny Mixtral."""
    from tests.support.tiny_checkpoints import MIXTRAL_TEXT

    return MIXTRAL_TEXT.eos_token_id
