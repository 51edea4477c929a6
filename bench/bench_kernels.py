"""Speed of the CPU kernels on one core: `python bench/bench_kernels.py [NAME ...]`.

Prints the median and the fastest of repeated calls. The two differ widely where other processes
use the machine; compare kernels by the fastest.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from expertmesh.model_config import SILU, GateConfig, KvLayout, RopeConfig
from expertmesh_kernels.combine import combine
from expertmesh_kernels.grouped_mlp import gated_mlp, pack_expert
from expertmesh_kernels.linear import linear, pack_linear
from expertmesh_kernels.logits import Histories, keep_only, penalize
from expertmesh_kernels.norm import rms_norm
from expertmesh_kernels.paged_attention import AttentionOptions, KvCache, paged_attention, write_kv
from expertmesh_kernels.rope import apply_rope, rope_table
from expertmesh_kernels.router import route
from expertmesh_kernels.sampling import sample, top_logprobs

BUDGET_S = 0.4


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Median and minimum seconds of a call, after a warm-up."""
    run()
    times: list[float] = []
    end = time.perf_counter() + BUDGET_S
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times)), min(times)


def show(name: str, run: Callable[[], object]) -> None:
    """One line for a small op."""
    median, fastest = timed(run)
    print(f"{name:32} {median * 1e6:9.1f} us  fastest {fastest * 1e6:9.1f} us")


def bench_linear() -> None:
    """The linear layer against `F.linear` with one thread."""
    for dtype in (torch.float32, torch.bfloat16):
        for depth, columns in ((576, 3072), (1536, 576)):
            weight = torch.randn(columns, depth).to(dtype)
            packed = pack_linear(weight)
            for rows in (1, 4, 8, 32, 512):
                x = torch.randn(rows, depth).to(dtype)
                median, ours = timed(lambda x=x, packed=packed: linear(x, packed))
                _, torchs = timed(lambda x=x, weight=weight: torch.nn.functional.linear(x, weight))
                print(
                    f"{str(dtype)[6:]:9} [{columns}x{depth}] {rows:4} rows"
                    f"  median {median * 1e6:8.0f} us  fastest {ours * 1e6:8.0f} us"
                    f"  {2 * rows * depth * columns / ours / 1e9:6.1f} GFLOP/s"
                    f"  {weight.nbytes / ours / 1e9:5.1f} GB/s  torch {torchs * 1e6:8.0f} us"
                    f"  ours/torch {ours / torchs:5.2f}"
                )


def bench_attention() -> None:
    """9 query heads on 3 KV heads of 64: one row after 500 keys, and a prompt of 512."""
    options = AttentionOptions(scale=0.125, value_dim=64)
    for dtype in (torch.float32, torch.bfloat16):
        layout = KvLayout(num_heads=3, key_dim=64, value_dim=64)
        pool = torch.zeros(64, 16 * layout.width, dtype=dtype)
        cache = KvCache(pool, 0, layout, block_size=16)
        k = torch.randn(1024, 3, 64).to(dtype)
        write_kv(k, k, cache, np.arange(1024))
        tables = np.random.default_rng(0).permutation(64).astype(np.int32)[None]
        for positions in (np.arange(499, 500), np.arange(512)):
            rows = len(positions)
            q = torch.randn(rows, 9, 64).to(dtype)
            arguments = (tables, np.zeros(rows, np.int32), positions.astype(np.int32))
            show(
                f"attention {str(dtype)[6:]} {rows} rows",
                lambda q=q, c=cache, a=arguments: paged_attention(q, c, *a, options),
            )
        show(
            f"write_kv {str(dtype)[6:]} 1 row",
            lambda k=k, c=cache: write_kv(k[:1], k[:1], c, np.arange(1)),
        )


def bench_latent() -> None:
    """Attention over latents of 512 + 64: one row after 2000 keys, and a prompt of 128."""
    layout = KvLayout(num_heads=1, key_dim=576, value_dim=0)
    options = AttentionOptions(scale=0.1, value_dim=512)
    k = torch.randn(2048, 1, 576).bfloat16()
    cache = KvCache(torch.zeros(128, 16 * 576, dtype=k.dtype), 0, layout, block_size=16)
    write_kv(k, k[..., :0], cache, np.arange(2048))
    tables = np.random.default_rng(0).permutation(128).astype(np.int32)[None]
    for num_heads in (16, 128):
        for positions in (np.arange(1999, 2000), np.arange(128)):
            rows = len(positions)
            q = torch.randn(rows, num_heads, 576).bfloat16()
            arguments = (tables, np.zeros(rows, np.int32), positions.astype(np.int32))
            show(
                f"latent {num_heads} heads {rows} rows",
                lambda q=q, a=arguments: paged_attention(q, cache, *a, options),
            )


def bench_small() -> None:
    """The other ops, mostly one row: what a call costs."""
    x = torch.randn(1, 576).bfloat16()
    weight = torch.ones(576)
    tiny = pack_linear(torch.randn(64, 576).bfloat16())
    expert = pack_expert(torch.randn(3072, 576).bfloat16(), torch.randn(576, 1536).bfloat16())
    table = rope_table(RopeConfig(theta=1e4, dim=64), 64)
    q = torch.randn(1, 9, 64).bfloat16()
    position = np.zeros(1, np.int32)
    logits = torch.randn(1, 8)
    weights = np.ones((1, 2), np.float32)
    outputs = torch.randn(2, 576).bfloat16()
    show("linear [64x576] 1 row", lambda: linear(x, tiny))
    show("expert [3x1536x576] 1 row", lambda: gated_mlp(x, expert, SILU))
    show("rms_norm 1 row", lambda: rms_norm(x, weight, 1e-5))
    show("rope 1 row", lambda: apply_rope(q, position, table))
    show("route 1 row", lambda: route(logits, GateConfig(8, 2)))
    show("combine 1 row", lambda: combine(outputs, weights))


def bench_sampling() -> None:
    """One row of 49,152 logits."""
    logits = torch.randn(1, 49_152) * 3
    for name, temperature, top_p, top_k in (
        ("greedy", 0, 1, 0),
        ("temperature", 1, 1, 0),
        ("top_k", 1, 1, 50),
        ("top_p", 1, 0.9, 0),
    ):
        arguments = (
            np.full(1, temperature, np.float32),
            np.zeros(1, np.float32),
            np.full(1, top_p, np.float32),
            np.full(1, top_k, np.int32),
            np.ones(1, np.uint64),
            np.ones(1, np.int64),
        )
        show(f"sample {name}", lambda a=arguments: sample(logits, *a))
    show("top_logprobs 20", lambda: top_logprobs(logits, np.zeros(1, np.int64), 20))


def bench_sampler() -> None:
    """A step's sampling: 32 rows of 49,152 logits after 500 tokens each."""
    rows, vocab_size = 32, 49_152
    logits = (torch.randn(rows, vocab_size) * 3).numpy()
    tokens = np.random.default_rng(0).integers(0, vocab_size, (rows, 500)).astype(np.int32)
    every = np.arange(rows)
    histories = Histories(tokens, every, np.full(rows, 200), np.full(rows, 500))
    ones, bits = np.ones(rows, np.float32), np.full((rows, vocab_size // 32), 0x5555, np.uint32)

    def choose(temperature: float, min_p: float, top_p: float, array: object = logits) -> None:
        filters = [np.full(rows, value, np.float32) for value in (temperature, min_p, top_p)]
        top_k, seeds = np.zeros(rows, np.int32), np.ones(rows, np.uint64)
        sample(torch.from_numpy(array), *filters, top_k, seeds, every)

    def penalized() -> None:
        edited = logits.copy()
        penalize(edited, every, histories, ones * 1.2, ones * 0.1, ones * 0.1)
        choose(1, 0.02, 0.95, edited)

    show("sampler 32 greedy", lambda: choose(0, 0, 1))
    show("sampler 32 temperature", lambda: choose(1, 0, 1))
    show("sampler 32 min_p, top_p", lambda: choose(1, 0.02, 0.95))
    show("sampler 32 penalties, min_p, top_p", penalized)
    show("copy 32 rows", logits.copy)
    show("keep_only 32 rows", lambda: keep_only(logits.copy(), every, bits))


def main() -> None:
    """Run the benchmarks named on the command line, or all."""
    parser = argparse.ArgumentParser(description="Measure kernels.")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--json", metavar="FILE", help="of gpu: keep the lines")
    parser.add_argument("--tune", action="store_true", help="of gpu: try tiles instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    benches = {
        "linear": bench_linear,
        "attention": bench_attention,
        "latent": bench_latent,
        "small": bench_small,
        "sampling": bench_sampling,
        "sampler": bench_sampler,
    }
    for name in options.names or (["gpu"] if torch.cuda.is_available() else list(benches)):
        if name == "gpu":
            bench_gpu(options.json, tune=options.tune)
        else:
            benches[name]()


def bench_gpu(json_path: str | None, *, tune: bool) -> None:
    """The Triton kernels."""
    if not torch.cuda.is_available():
        sys.exit("error: torch finds no CUDA device")
    import gpu_kernels

    if tune:
        gpu_kernels.tune()
    else:
        gpu_kernels.run(json_path)


if __name__ == "__main__":
    main()
