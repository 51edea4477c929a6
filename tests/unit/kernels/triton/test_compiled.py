"""Kernels as they are compiled for GPUs, which takes none: variants, instructions, spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

OPS = [
    "linear", "linear in fp32", "linear of heads", "experts", "experts in int8", "experts in int4",
    "experts in fp8", "experts in mxfp4", "attention", "attention over int8",
    "attention over a latent", "router", "small", "sampling",
]  # fmt: skip
_ROOT = Path(__file__).parents[4]
_IN_FP32 = {"linear in fp32", "router", "small", "sampling"}
_NO_PRODUCTS = {"_count", "_place", "_write_kv", "_merge"}


def compiled(arch: int, *arguments: str) -> list[dict[str, Any]]:
    """What `tests.support.compiled_kernels` says, in a process that compiles."""
    command = [sys.executable, "-m", "tests.support.compiled_kernels", str(arch), *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run(
        command, env=environment, cwd=_ROOT, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def check(lines: list[dict[str, Any]]) -> None:
    """Products of 16 bits use `mma.sync` whatever the tile, so that bits do not depend on it."""
    for line in lines:
        is_exact = line["op"] in _IN_FP32 or line["kernel"] in _NO_PRODUCTS
        assert line["matrix"] == ([] if is_exact else ["mma"]), line
        assert line["spilled"] <= 128, line


def test_variants_and_instructions_do_not_depend_on_rows() -> None:
    """A low and a tall tile, and for attention splits in the grid or not: known after a few.

    Hopper has another instruction for tall tiles, of which the order of sums is not known.
    """
    lines = compiled(90, "linear", "--variants")
    variants = [line for line in lines if "variants" in line]
    assert [line["op"] for line in variants] == OPS
    for line in variants:
        assert line["variants"][-1] <= 3 * line["kernels"], line
        assert len(set(line["variants"])) <= 2, line
    kernels = [line for line in lines if "matrix" in line]
    assert len(kernels) == 2
    check(kernels)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100, 120])
@pytest.mark.parametrize("name", OPS)
def test_all_ops_compile_for(name: str, arch: int) -> None:
    """Ampere, Hopper and both Blackwells, to machine code, with hardly a register spilled."""
    lines = compiled(arch, name)
    assert lines
    check(lines)
