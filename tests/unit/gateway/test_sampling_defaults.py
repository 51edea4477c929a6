"""Defaults of sampling from a model folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expertmesh.errors import CheckpointError
from gateway.generation_options import GenerationOptions, sampling_params
from gateway.sampling_defaults import FILE, SamplingDefaults

FULL = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "repetition_penalty": 1.05,
}


def _read(folder: Path, content: object) -> SamplingDefaults:
    (folder / FILE).write_text(json.dumps(content))
    return SamplingDefaults.from_checkpoint(folder, 100)


def test_open_parameters_are_filled(tmp_path: Path) -> None:
    """A request without a parameter gets the model's, one with it keeps its own."""
    defaults = _read(tmp_path, {**FULL, "do_sample": True, "eos_token_id": 2, "max_length": 9})
    options = GenerationOptions(top_p=0.5, top_k=0)
    defaults.fill(options)
    params = sampling_params(options, max_tokens=5, num_logprobs=None)
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.5, 0)
    assert (params.min_p, params.repetition_penalty, params.max_tokens) == (0.1, 1.05, 5)


@pytest.mark.parametrize("content", [None, {}, {"temperature": None, "eos_token_id": 1}])
def test_nothing_recommended(tmp_path: Path, content: object) -> None:
    """Without the file, or without a value in it, the API's own defaults hold."""
    defaults = SamplingDefaults() if content is None else _read(tmp_path, content)
    if content is None:
        assert SamplingDefaults.from_checkpoint(tmp_path, 100) == defaults
    options = GenerationOptions()
    defaults.fill(options)
    assert options == GenerationOptions()


def test_greedy_model(tmp_path: Path) -> None:
    """A temperature of 0 makes every request greedy that does not say otherwise."""
    options = GenerationOptions()
    _read(tmp_path, {"temperature": 0}).fill(options)
    assert sampling_params(options, max_tokens=1, num_logprobs=None).temperature == 0


def test_more_candidates_than_tokens(tmp_path: Path) -> None:
    """All of the vocabulary."""
    options = GenerationOptions()
    _read(tmp_path, {"top_k": 5000}).fill(options)
    assert options.top_k == 100


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("temperature", "hot"), ("top_p", 0), ("top_k", -2), ("min_p", 2)],
)
def test_bad_value(tmp_path: Path, name: str, value: object) -> None:
    """A value that no request could have stops the start, with file and name."""
    with pytest.raises(CheckpointError, match=f"{FILE}: {name}"):
        _read(tmp_path, {name: value})
