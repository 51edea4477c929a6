"""Compiles Triton kernels for a GPU that need not be there, and tells what came out.

Run as a program, not under the interpreter: `python -m tests.support.compiled_kernels 90 linear`
launches ops on meta tensors. A launch compiles for the given architecture, down to machine code,
and runs nothing. Prints a JSON line for each kernel. With `--variants` also one for each op, of all
ops: how many variants there are after one number of rows after the other.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from expertmesh.model_config import SILU, GateConfig, KvLayout
from expertmesh_kernels.triton import (
    attention,
    combine,
    grouped_mlp,
    kv,
    linear,
    norm,
    rope,
    router,
    sampling,
    weights,
)

ROWS = (1, 2, 3, 8, 16, 17, 31, 40, 64, 100, 500, 512, 1000, 4096)


@contextmanager
def recorded(arch: int, on_new: Callable[[Any, ASTSource, Any], None] | None) -> Iterator[set[str]]:
    """Launches inside do not run; the set gets what they were specialised for.

    Args:
        arch: Compute capability times ten.
        on_new: Gets kernel, source and options of each launch that needs a new kernel.
    """
    backend = make_backend(GPUTarget("cuda", arch, 32))
    seen: set[str] = set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        bind = create_function_from_signature(self.signature, self.params, backend)
        kwargs = {"debug": False, "instrumentation_mode": "", **kwargs}
        bound, specialization, options = bind(*args, **kwargs)
        key = f"{self.__name__} {specialization} {options}"
        if key in seen:
            return
        seen.add(key)
        if on_new is not None:
            options, signature, constants, attributes = self._pack_args(
                backend, kwargs, bound, specialization, options
            )
            on_new(self, ASTSource(self, signature, constants, attributes), options)

    original = JITFunction.run
    JITFunction.run = run
    try:
        yield seen
    finally:
        JITFunction.run = original


def describe(arch: int, kernel: Any, source: ASTSource, options: Any) -> dict[str, Any]:
    """Compiles, and finds matrix instructions, registers, and bytes spilled by a thread."""
    target = GPUTarget("cuda", arch, 32)
    ptx = triton.compile(source, target=target, options=options.__dict__).asm["ptx"]
    words = {word for line in ptx.splitlines() for word in line.split()[:1]}
    matrix = {word.split(".")[0] for word in words if word.startswith(("mma", "wgmma", "tcgen05"))}
    return {"kernel": kernel.__name__, "matrix": sorted(matrix), **_assembled(ptx, arch)}


def _assembled(ptx: str, arch: int) -> dict[str, int]:
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    program = folder / ("ptxas-blackwell" if arch >= 100 else "ptxas")
    name = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "kernel.ptx"
        source.write_text(ptx)
        command = [program, "-v", f"--gpu-name={name}", source, "-o", f"{temporary}/out"]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    words = text.replace(",", " ").split()
    at = words.index("spill")
    return {"registers": int(words[words.index("registers") - 1]), "spilled": int(words[at - 2])}


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


_wide = partial(_meta, dtype=torch.float32)
_int32 = partial(_meta, dtype=torch.int32)
_int64 = partial(_meta, dtype=torch.int64)
_bytes = partial(_meta, dtype=torch.uint8)


def _experts(make: Callable[[int, int], weights.DeviceWeight], rows: int) -> None:
    """Eight experts of 4096 x 1536."""
    tables = [weights.WeightTable(_int64(8, 4), make(*s)) for s in ((3072, 4096), (4096, 1536))]
    where = _int64(rows), _int32(rows)
    grouped_mlp.grouped_mlp(_meta(rows, 4096), *where, grouped_mlp.MlpTables(*tables), SILU)


def _plain(columns: int, depth: int) -> weights.DeviceWeight:
    return weights.plain(_meta(depth, columns))


def _int8(columns: int, depth: int) -> weights.DeviceWeight:
    return weights.pack_integers(8, _int32(columns, depth), _wide(columns, 1))


def _int4(columns: int, depth: int) -> weights.DeviceWeight:
    return weights.pack_integers(4, _int32(columns, depth), _wide(columns, depth // 32))


def _fp8(columns: int, depth: int) -> weights.DeviceWeight:
    return weights.pack_fp8(_bytes(columns, depth), _wide(columns // 128, depth // 128))


def _mxfp4(columns: int, depth: int) -> weights.DeviceWeight:
    blocks = _bytes(columns, depth // 32, 16)
    return weights.pack_mxfp4(blocks, _bytes(columns, depth // 32), _meta(columns))


def _attention(
    num_heads: int, layout: KvLayout, value_dim: int, rows: int, *, quantised: bool = False
) -> None:
    """Keys and values written, and attended to with all options."""
    group = num_heads // layout.num_heads
    pool = _meta(9, layout.width * 16, dtype=torch.int8 if quantised else torch.bfloat16)
    factors = (_wide(144, layout.num_heads),) * 2 if quantised else ()
    pages = kv.DevicePages(pool, 0, layout, 16, *factors)
    k, v = (_meta(rows, layout.num_heads, d) for d in (layout.key_dim, layout.value_dim))
    kv.write_kv(k, v, pages, _int64(rows))
    scores = attention.Scores(0.1, value_dim, 4096, 50.0, _wide(num_heads))
    max_rows = attention.rows_per_tile(group, prefill=rows > 1)
    tiles = attention.RowTiles(_int32(rows), _int32(rows), max_rows)
    where = _int32(3, 9), _int32(rows), _int32(rows)
    for max_len in (100, 3000):
        q = _meta(rows, num_heads, layout.key_dim)
        attention.paged_attention(q, pages, *where, tiles, scores, max_len)


def _route(rows: int) -> None:
    """A small gate, and one with groups."""
    router.route_rows(_meta(rows, 4096), _wide(4096, 8), GateConfig(8, 2))
    gate = GateConfig(
        256, 8, scoring="sigmoid", selection_bias=True, num_groups=8, top_groups=4,
        group_score="top2_sum",
    )  # fmt: skip
    router.route_rows(_meta(rows, 4096), _wide(4096, 256), gate, selection_bias_E=_wide(256))


def _small(rows: int) -> None:
    norm.add_rms_norm(_meta(rows, 4096), _meta(rows, 4096), _wide(4096), 1e-5)
    tables = _wide(99, 64), _wide(99, 64)
    rope.apply_rope(_meta(rows, 8, 128), _int32(rows), *tables, interleaved=False)
    combine.combine(_meta(8 * rows, 4096), _wide(rows, 8))


def _sample(rows: int) -> None:
    types = (torch.float32,) * 3 + (torch.int32, torch.int64, torch.int64)
    sampling.sample(_wide(rows, 49152), *(_meta(rows, dtype=dtype) for dtype in types))


OPS: dict[str, Callable[[int], object]] = {
    "linear": lambda rows: linear.linear(_meta(rows, 4096), _meta(4096, 6144), _meta(6144)),
    "linear in fp32": lambda rows: linear.linear(_wide(rows, 512), _wide(512, 640)),
    "linear of heads": lambda rows: linear.head_linear(_meta(rows, 16, 128), _meta(16, 128, 512)),
    "experts": partial(_experts, _plain),
    "experts in int8": partial(_experts, _int8),
    "experts in int4": partial(_experts, _int4),
    "experts in fp8": partial(_experts, _fp8),
    "experts in mxfp4": partial(_experts, _mxfp4),
    "attention": partial(_attention, 32, KvLayout(8, 128, 128), 128),
    "attention over int8": partial(_attention, 32, KvLayout(8, 128, 128), 128, quantised=True),
    "attention over a latent": partial(_attention, 128, KvLayout(1, 576, 0), 512),
    "router": _route,
    "small": _small,
    "sampling": _sample,
}


def main() -> None:
    """See the top of the file."""
    arch, *names = (argument for argument in sys.argv[1:] if not argument.startswith("--"))
    if "--variants" in sys.argv:
        for name in OPS:
            _print_variants(int(arch), name)
    for name in names:

        def show(kernel: Any, source: ASTSource, options: Any, name: str = name) -> None:
            _say({"op": name, **describe(int(arch), kernel, source, options)})

        with recorded(int(arch), show):
            for rows in (1, 4096):
                OPS[name](rows)


def _print_variants(arch: int, name: str) -> None:
    counts = []
    with recorded(arch, None) as seen:
        for rows in ROWS:
            OPS[name](rows)
            counts.append(len(seen))
    _say({"op": name, "variants": counts, "kernels": len({k.split()[0] for k in seen})})


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
