"""Clients that are too large for the default run: each has an environment of its own, which
`make conformance-full` makes. What is not installed is skipped.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from expertmesh.model_tools.demo import ensure_demo_model
from expertmesh.model_tools.progress import NoProgress
from expertmesh.settings import data_home
from tests.support.api import Json
from tests.support.demo_clients import ANSWER, MODEL, QUESTION, run
from tests.support.mesh import Server, serve
from tests.support.oracle import Oracle
from tests.support.processes import ROOT

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
CLIENTS = Path(os.environ.get("CONFORMANCE_CLIENTS", ROOT / ".venv-conformance"))
"""A folder a client, each a virtual environment, or for `node` the installed packages."""
TOLERANCE = 1e-3
"""Of the log-likelihood of a short text; both sides compute in FP32."""
ONLINE = {"HF_HUB_OFFLINE": None}
"""aiperf refuses even a local tokenizer when it is told to be offline."""


def _client(name: str, program: str) -> Path:
    """A program of a client's environment."""
    path = CLIENTS / name / "bin" / program
    if not path.exists():
        pytest.skip(f"{path} is missing: make conformance-full")
    return path


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The demo model with two expert workers, in FP32."""
    with serve("demo") as server:
        yield server


@pytest.fixture(scope="module")
def root_url(server: Server) -> str:
    """URL without a path."""
    return f"http://127.0.0.1:{server.api.port}"


@pytest.fixture(scope="module")
def model_dir() -> Path:
    """Folder of the model."""
    return ensure_demo_model(data_home(), "granular", NoProgress())


_LITELLM = f"""
import asyncio, json, sys
import litellm

fields = dict(
    api_base=sys.argv[1], api_key="none", temperature=0, max_tokens=16,
    messages=[{{"role": "user", "content": {QUESTION!r}}}],
)
found = {{}}
for provider in ("hosted_vllm", "openai"):
    model = f"{{provider}}/{MODEL}"
    answer = litellm.completion(model=model, **fields)
    pieces = litellm.completion(
        model=model, **fields, stream=True, stream_options={{"include_usage": True}}
    )
    pieces = list(pieces)
    text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
    usage = [p.usage.completion_tokens for p in pieces if getattr(p, "usage", None)]
    later = asyncio.run(litellm.acompletion(model=model, **fields))
    found[provider] = {{
        "texts": [answer.choices[0].message.content, text, later.choices[0].message.content],
        "finish": answer.choices[0].finish_reason,
        "tokens": [answer.usage.completion_tokens, usage[-1]],
    }}
try:
    litellm.completion(model="hosted_vllm/nothing", **fields)
except litellm.NotFoundError:
    found["error"] = "NotFoundError"
print("RESULT " + json.dumps(found))
"""


def test_litellm(root_url: str, tmp_path: Path) -> None:
    """As a vLLM and as an OpenAI server; whole, streamed, asynchronous, and refused."""
    python = _client("litellm", "python")
    script = tmp_path / "client.py"
    script.write_text(_LITELLM)
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    output = run([str(python), str(script), f"{root_url}/v1"], env=env, timeout_s=120)
    found = json.loads(output.rpartition("RESULT ")[2].splitlines()[0])
    for provider in ("hosted_vllm", "openai"):
        assert found[provider] == {"texts": [ANSWER] * 3, "finish": "stop", "tokens": [8, 8]}
    assert found["error"] == "NotFoundError"


def test_lm_eval(root_url: str, tmp_path: Path, model_dir: Path) -> None:
    """Log-likelihoods are those of transformers on the same checkpoint; the tokenizer is ours, over
    HTTP.
    """
    program = _client("lm_eval", "lm_eval")
    arguments = {
        "model": MODEL,
        "base_url": f"{root_url}/v1/completions",
        "tokenizer_backend": "remote",
        "num_concurrent": "2",
        "max_length": "2048",
    }
    command = [str(program), "--model", "local-completions", "--tasks", "capitals"]
    command += ["--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())]
    command += ["--include_path", str(HERE / "lm_eval"), "--output_path", str(tmp_path)]
    run([*command, "--log_samples"], cwd=HERE / "lm_eval", timeout_s=240)
    samples = _samples(tmp_path)
    assert len(samples) == 6
    assert sum(sample["acc"] for sample in samples) >= 5
    oracle, tokenizer = Oracle(model_dir), AutoTokenizer.from_pretrained(model_dir)
    compared = 0
    for sample in samples:
        question = sample["doc"]["question"]
        for choice, (found, is_greedy) in zip(
            sample["doc"]["choices"], _likelihoods(sample), strict=True
        ):
            expected, greedy = _expected(oracle, tokenizer, question, f" {choice}")
            assert found == pytest.approx(expected, abs=TOLERANCE), (question, choice)
            assert is_greedy == greedy
            compared += 1
    assert compared == 18


def _samples(folder: Path) -> list[Json]:
    (path,) = folder.rglob("samples_capitals_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def _likelihoods(sample: Json) -> list[tuple[float, bool]]:
    """(log-likelihood, whether greedy decoding says it) of each choice."""
    pairs = [response[0] for response in sample["resps"]]
    return [(float(value), str(greedy) == "True") for value, greedy in pairs]


def _expected(oracle: Oracle, tokenizer: Json, prompt: str, text: str) -> tuple[float, bool]:
    whole, begin = tokenizer(prompt + text).input_ids, len(tokenizer(prompt).input_ids)
    wanted = whole[begin:]
    logits = torch.from_numpy(oracle.logits(whole)[begin - 1 : -1])
    logprobs = logits.double().log_softmax(-1)[range(len(wanted)), wanted]
    return float(logprobs.sum()), logits.argmax(-1).tolist() == wanted


def test_guidellm(root_url: str, tmp_path: Path, model_dir: Path) -> None:
    """A short load: every request succeeds with the asked number of tokens."""
    program = _client("guidellm", "guidellm")
    report = tmp_path / "report.json"
    command = [str(program), "run", "--backend", f"kind=openai_http,target={root_url}"]
    command += ["--tokenizer", f"kind=hf_auto,model={model_dir}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint"]
    command += ["kind=max_requests,count=8"]
    command += ["--output", f"kind=json,path={report}", "--disable-console-interactive"]
    run(command, cwd=tmp_path, timeout_s=240)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (8, 0, 0)
    produced = benchmark["metrics"]["output_token_count"]["successful"]
    assert produced["mean"] == 8


def test_aiperf(root_url: str, tmp_path: Path, model_dir: Path) -> None:
    """A short load with streaming; it also reads our metrics."""
    program = _client("aiperf", "aiperf")
    command = [str(program), "profile", "--model", MODEL, "--url", root_url, "--streaming"]
    command += ["--endpoint-type", "chat", "--tokenizer", str(model_dir), "--ui", "none"]
    command += ["--concurrency", "2", "--request-count", "8", "--artifact-dir", str(tmp_path)]
    command += ["--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8"]
    run([*command, "--extra-inputs", "ignore_eos:true"], cwd=tmp_path, env=ONLINE, timeout_s=240)
    (report,) = tmp_path.rglob("profile_export_aiperf.json")
    found = json.loads(report.read_text())
    assert found["request_count"]["avg"] == 8
    assert not found.get("error_summary")
    (scraped,) = tmp_path.rglob("server_metrics_export.csv")
    names = {cell for row in csv.reader(scraped.read_text().splitlines()) for cell in row}
    assert "vllm:num_requests_running" in names


@pytest.fixture(scope="module")
def node() -> str:
    """The program `node`, if it and the packages are there."""
    program = shutil.which("node")
    if program is None:
        pytest.skip("node is not installed")
    if not (CLIENTS / "node" / "node_modules").exists():
        pytest.skip(f"{CLIENTS / 'node'} has no packages: make conformance-full")
    return program


def _run_node(node: str, script: str, *arguments: str) -> Json:
    """Runs a script where its packages are found: Node looks beside the script only."""
    path = CLIENTS / "node" / script
    shutil.copyfile(HERE / "node" / script, path)
    return json.loads(run([node, str(path), *arguments]))


def test_grpc_in_node(server: Server, node: str) -> None:
    """@grpc/grpc-js with nothing but the proto."""
    address = f"127.0.0.1:{server.grpc_port}"
    found = _run_node(node, "grpc_client.mjs", str(ROOT / "proto"), address, QUESTION)
    assert found.pop("num_pieces") > 3
    assert found == {
        "text": ANSWER,
        "finish_reason": "FINISH_REASON_STOP",
        "completion_tokens": 8,
        "model": MODEL,
        "num_tokens": 7,
        "error": "INVALID_ARGUMENT",
    }


def test_openai_in_node(root_url: str, node: str) -> None:
    """OpenAI's client for Node."""
    assert _run_node(node, "openai_client.mjs", f"{root_url}/v1", MODEL, QUESTION) == {
        "whole": ANSWER,
        "finish_reason": "stop",
        "streamed": ANSWER,
        "completion_tokens": 8,
        "error": "NotFoundError",
        "code": "model_not_found",
    }
