"""Compiles Triton kernels without a GPU, and tells what came out.

Run as a program, not under the interpreter: `python -m tests.support.compiled_kernels 90` launches
each op on meta tensors. A launch compiles for the given architecture, down to machine code, and
runs nothing. Prints one JSON line a kernel.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

Launch = tuple[str, str]
"""Name of the kernel, and what it was specialised for."""


@contextmanager
def recorded(
    arch: int, on_launch: Callable[[JITFunction, Any, Any], None]
) -> Iterator[set[Launch]]:
    """Launches inside do not run; `on_launch` gets each new (function, source, options)."""
    target = GPUTarget("cuda", arch, 32)
    seen: set[Launch] = set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        backend = make_backend(target)
        bind = create_function_from_signature(self.signature, self.params, backend)
        kwargs = {"debug": False, "instrumentation_mode": "", **kwargs}
        bound, specialization, options = bind(*args, **kwargs)
        key = (self.__name__, f"{specialization} {options}")
        if key in seen:
            return
        seen.add(key)
        options, signature, constants, attributes = self._pack_args(
            backend, kwargs, bound, specialization, options
        )
        on_launch(self, ASTSource(self, signature, constants, attributes), options)

    original = JITFunction.run
    JITFunction.run = run
    try:
        yield seen
    finally:
        JITFunction.run = original


def describe(arch: int, function: JITFunction, source: ASTSource, options: Any) -> dict[str, Any]:
    """Compile, and find out which matrix instructions, registers and spills there are."""
    target = GPUTarget("cuda", arch, 32)
    kernel = triton.compile(source, target=target, options=options.__dict__)
    ptx = kernel.asm["ptx"]
    words = {word for line in ptx.splitlines() for word in line.split()[:1]}
    report = _ptxas(ptx, arch)
    return {
        "kernel": function.__name__,
        "matrix": sorted(w for w in words if "mma" in w and "fence" not in w and "wait" not in w),
        "shared": kernel.metadata.shared,
        **report,
    }


def _ptxas(ptx: str, arch: int) -> dict[str, int]:
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "kernel.ptx"
        source.write_text(ptx)
        name = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
        program = folder / ("ptxas-blackwell" if arch >= 100 else "ptxas")
        command = [program, "-v", f"--gpu-name={name}", source, "-o", f"{temporary}/out"]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    words = text.replace(",", " ").split()
    return {
        "registers": int(words[words.index("registers") - 1]),
        "spilled": sum(int(words[i - 3]) for i, word in enumerate(words) if word == "stores")
        if "stores" in words
        else 0,
    }
