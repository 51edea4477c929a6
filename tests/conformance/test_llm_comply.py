"""The suite of `llm-comply` against the demo model, greedy so that it always answers the same."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from llm_comply.tests import get_tests

from expertmesh.model_tools.demo import ensure_demo_model
from expertmesh.model_tools.progress import NoProgress
from expertmesh.settings import data_home
from tests.support.demo_clients import MODEL, greedy_model, run
from tests.support.mesh import serve

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of the demo model with two expert workers, whose authors recommend to be greedy."""
    folder = greedy_model(
        ensure_demo_model(data_home(), "granular", NoProgress()), tmp_path_factory.mktemp("greedy")
    )
    flags = ("--served-model-name", MODEL, "--require-model", "--max-model-len", "1400")
    with serve(folder, *flags, dtype="bfloat16") as server:
        yield f"http://127.0.0.1:{server.api.port}/v1"


# Greedy, the demo model counts from 1 to 5 and then on, until its limit.
COUNTING = {
    "openai-chat": "chat-streaming-response",
    "anthropic": "anth-streaming-response",
    "open-responses": "streaming-response",
}


@pytest.mark.parametrize(
    ("form", "counting"),
    [
        ("openai-chat", False),
        ("anthropic", False),
        ("open-responses", False),
        ("openai-chat", True),
        ("anthropic", True),
    ],
)
def test_llm_comply(url: str, form: str, counting: bool) -> None:
    """An independent suite; all its cases but those about images, which this model does not see.

    The case that takes longest runs alone. For open-responses it is left out: it wants an answer
    that ends by itself.
    """
    program = Path(sys.executable).parent / "llm-comply"
    cases = [case.id for case in get_tests(form) if "image" not in case.id]
    chosen = [case for case in cases if (case == COUNTING[form]) == counting]
    command = [str(program), "run", "-u", url, "-k", "none", "-m", MODEL, "--format", form]
    command += ["--json", "--timeout", "240", "-f", ",".join(chosen)]
    report = json.loads(run(command, timeout_s=280))
    assert report["summary"]["failed"] == 0
    statuses = {result["id"]: result["status"] for result in report["results"]}
    assert sorted(statuses) == sorted(chosen)
    skipped = {case for case, status in statuses.items() if status != "passed"}
    assert all("reasoning" in case or "thinking" in case for case in skipped), report
