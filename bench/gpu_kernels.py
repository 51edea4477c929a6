"""Speed of the Triton kernels against the roofline: `python bench/bench_kernels.py gpu`.

The roofline of a call is the larger of two times: the bytes that it must move by the memory's
bandwidth, and its operations by the peak of the units that do them. Both are looked up by the
device's name; those of a device that is not in the table are measured, with a copy and a product
of torch. Prints a line a call, with the median of calls from a cold L2 cache; `--json FILE` keeps
them. `--tune` instead tries tiles for the products and prints lines for
`expertmesh_kernels.triton.tiles`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from expertmesh.model_config import SILU, GateConfig, KvLayout
from expertmesh_kernels.triton import (
    attention,
    combine,
    grouped_mlp,
    kv,
    linear,
    norm,
    order,
    rope,
    router,
    sampling,
    tiles,
    weights,
)

ROWS = (1, 8, 32, 256, 2048)

PEAKS = {
    "A100-SXM4-80GB": (2039, 312, 19.5),
    "A100": (1555, 312, 19.5),
    "H200": (4800, 989, 67),
    "H100 PCIe": (2039, 756, 51),
    "H100": (3352, 989, 67),
    "B200": (8000, 2250, 80),
    "L40S": (864, 362, 91.6),
    "L4": (300, 121, 30.3),
    "A10": (600, 125, 31.2),
    "4090": (1008, 165, 82.6),
    "3090": (936, 71, 35.6),
}
"""By part of the device's name, the first that fits: GB/s, TFLOP/s of dense products in 16 bits,
TFLOP/s in FP32 without tensor cores. From the vendor's data sheets."""


@dataclass(frozen=True)
class Roof:
    """What a device can do at most."""

    gigabytes_per_s: float
    teraflops_16: float
    teraflops_32: float
    source: str

    def time_s(self, case: Case) -> float:
        """The least time of a call."""
        peak = self.teraflops_32 if case.is_fp32 else self.teraflops_16
        return max(case.nbytes / self.gigabytes_per_s / 1e9, case.operations / peak / 1e12)


@dataclass(frozen=True)
class Case:
    """A call, and what it must do."""

    op: str
    shape: str
    run: Callable[[], object]
    nbytes: int
    operations: int = 0
    is_fp32: bool = False


@dataclass(frozen=True)
class Line:
    """What is printed of a case."""

    op: str
    shape: str
    microseconds: float
    gigabytes_per_s: float
    teraflops: float
    roofline: float


def roof_of(device: torch.device) -> Roof:
    """Looked up, or measured."""
    name = torch.cuda.get_device_name(device)
    for part, peaks in PEAKS.items():
        if part in name:
            return Roof(*peaks, source=f"data sheet of {part}")
    source = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / time_s(lambda: target.copy_(source)) / 1e9
    peaks = []
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.randn(4096, 4096, device=device, dtype=dtype)
        peaks.append(2 * 4096**3 / time_s(lambda a=a: a @ a) / 1e12)
    return Roof(bandwidth, *peaks, source="measured with torch")


def time_s(run: Callable[[], object]) -> float:
    """Median of calls, each after the L2 cache was overwritten."""
    from triton.testing import do_bench

    return float(do_bench(run, quantiles=[0.5])) / 1e3


def size(*tensors: Tensor) -> int:
    """Bytes of all."""
    return sum(tensor.nbytes for tensor in tensors)


class Maker:
    """Makes random tensors on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def values(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Small ones."""
        return (torch.randn(*shape, device=self.device) / 8).to(dtype)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """From 0 on."""
        return torch.randint(0, high, shape, device=self.device, dtype=dtype)


def product_cases(make: Maker) -> Iterator[Case]:
    """Linear layers of a model with 4096 hidden units."""
    for columns, depth in ((6144, 4096), (4096, 4096), (4096, 14336)):
        weight = make.values(depth, columns)
        for rows in ROWS:
            x = make.values(rows, depth)
            moved = size(x, weight) + 2 * rows * columns
            yield Case(
                "linear bf16", f"{rows} x [{depth}, {columns}]",
                lambda x=x, weight=weight: linear.linear(x, weight),
                moved, 2 * rows * columns * depth,
            )  # fmt: skip


FORMATS: dict[str, Callable[[Maker, int, int], weights.DeviceWeight]] = {
    "bf16": lambda make, n, k: weights.plain(make.values(k, n)),
    "int8": lambda make, n, k: weights.pack_integers(
        8, make.integers(256, n, k) - 128, make.values(n, 1, dtype=torch.float32)
    ),
    "int4": lambda make, n, k: weights.pack_integers(
        4, make.integers(16, n, k) - 8, make.values(n, k // 128, dtype=torch.float32)
    ),
    "fp8": lambda make, n, k: weights.pack_fp8(
        make.integers(120, n, k, dtype=torch.uint8),
        make.values(n // 128, k // 128, dtype=torch.float32),
    ),
    "mxfp4": lambda make, n, k: weights.pack_mxfp4(
        make.integers(256, n, k // 32, 16, dtype=torch.uint8),
        make.integers(8, n, k // 32, dtype=torch.uint8) + 120,
    ),
}


def expert_cases(make: Maker) -> Iterator[Case]:
    """16 experts of 4096 x 1536, two a token, as one expert worker holds them."""
    num_experts, hidden, width, top_k = 16, 4096, 1536, 2
    for name, pack in FORMATS.items():
        gate_up = [pack(make, 2 * width, hidden) for _ in range(num_experts)]
        down = [pack(make, hidden, width) for _ in range(num_experts)]
        tables = grouped_mlp.MlpTables(weights.table_of(gate_up), weights.table_of(down))
        each = gate_up[0].nbytes + down[0].nbytes
        for rows in ROWS:
            pairs = rows * top_k
            x, owners = make.values(rows, hidden), make.integers(num_experts, pairs)
            row_of_pair = torch.arange(pairs, device=make.device) // top_k
            busy = num_experts if make.device.type == "meta" else len(owners.unique())
            yield Case(
                f"experts {name}", f"{rows} rows, {pairs} pairs",
                lambda x=x, r=row_of_pair, o=owners, t=tables, kept=(gate_up, down): (
                    grouped_mlp.grouped_mlp(x, r, o, t, SILU)
                ),
                busy * each + size(x) + 2 * pairs * (hidden + 2 * width),
                2 * pairs * hidden * 3 * width,
            )  # fmt: skip


def attention_cases(make: Maker) -> Iterator[Case]:
    """Decode after 4000 tokens and a prompt of 2048; grouped heads, and a latent."""
    for name, num_heads, layout, value_dim in (
        ("attention 32/8 heads of 128", 32, KvLayout(8, 128, 128), 128),
        ("attention over a latent, 128 heads", 128, KvLayout(1, 576, 0), 512),
    ):
        for sequences, length, rows in ((1, 4000, 1), (8, 4000, 1), (64, 4000, 1), (1, 2048, 2048)):
            blocks = -(-length // 16)
            pool = make.values(sequences * blocks, layout.width * 16)
            pages = kv.DevicePages(pool, 0, layout, 16)
            order_SB = torch.arange(sequences * blocks, device=make.device, dtype=torch.int32)
            group = num_heads // layout.num_heads
            height = attention.rows_per_tile(group, prefill=rows > 1)
            positions = torch.arange(length - rows, length, device=make.device, dtype=torch.int32)
            first = torch.arange(0, sequences * rows, height, device=make.device, dtype=torch.int32)
            tiles_ = attention.RowTiles(first, (sequences * rows - first).clamp(max=height), height)
            q = make.values(sequences * rows, num_heads, layout.key_dim)
            owners = torch.arange(sequences, device=make.device, dtype=torch.int32)
            arguments = (
                q, pages, order_SB.view(sequences, blocks), owners.repeat_interleave(rows),
                positions.repeat(sequences), tiles_, attention.Scores(0.1, value_dim), length,
            )  # fmt: skip
            seen = length if rows == 1 else (length + 1) / 2
            written = 2 * len(q) * num_heads * value_dim
            yield Case(
                name, f"{sequences} x {rows} rows, {length} keys",
                lambda a=arguments: attention.paged_attention(*a),
                size(q) + sequences * length * layout.width * 2 + written,
                int(2 * len(q) * num_heads * seen * (layout.key_dim + value_dim)),
            )  # fmt: skip


def small_cases(make: Maker) -> Iterator[Case]:
    """The rest of a layer, and sampling."""
    fp32 = torch.float32
    for rows in ROWS:
        x, weight = make.values(rows, 4096), make.values(4096, dtype=fp32)
        yield Case(
            "norm of a sum", f"{rows} x 4096",
            lambda x=x, w=weight: norm.add_rms_norm(x, x, w, 1e-5), 4 * size(x),
        )  # fmt: skip
        heads, cos = make.values(rows, 40, 128), make.values(4096, 64, dtype=fp32)
        positions = make.integers(4096, rows)
        yield Case(
            "rope", f"{rows} x 40 heads of 128",
            lambda h=heads, p=positions, c=cos: rope.apply_rope(h, p, c, c, interleaved=False),
            2 * size(heads),
        )  # fmt: skip
        for experts, top_k in ((8, 2), (128, 8)):
            gate = make.values(4096, experts, dtype=fp32)
            config = GateConfig(experts, top_k)
            yield Case(
                "router", f"{rows} x {experts} experts, top {top_k}",
                lambda x=x, g=gate, c=config: router.route_rows(x, g, c),
                size(x, gate), 2 * rows * gate.numel(), is_fp32=True,
            )  # fmt: skip
        owners = make.integers(128, rows * 8)
        yield Case(
            "order by expert", f"{rows * 8} pairs, 128 experts",
            lambda o=owners: order.order_by_expert(o, 128, 16), 3 * size(owners),
        )  # fmt: skip
        outputs, weights_TK = make.values(rows * 8, 4096), make.values(rows, 8, dtype=fp32)
        yield Case(
            "combine", f"{rows} x 8 x 4096",
            lambda o=outputs, w=weights_TK: combine.combine(o, w), size(outputs, x),
        )  # fmt: skip
    for rows in (1, 32, 256):
        logits = make.values(rows, 150_000, dtype=fp32) * 24
        ones = torch.ones(rows, device=make.device)
        counts = torch.ones(rows, device=make.device, dtype=torch.int64)
        for name, min_p, top_p, top_k in (("plain", 0, 1, 0), ("filtered", 0.01, 0.9, 50)):
            settings = (ones, ones * min_p, ones * top_p, (counts * top_k).int(), counts, counts)
            yield Case(
                f"sampling, {name}", f"{rows} x {logits.shape[1]}",
                lambda x=logits, s=settings: sampling.sample(x, *s), size(logits),
            )  # fmt: skip


def all_cases(device: torch.device) -> Iterator[Case]:
    """Every op."""
    make = Maker(device)
    for cases in (product_cases, expert_cases, attention_cases, small_cases):
        yield from cases(make)


def measure(case: Case, roof: Roof) -> Line:
    """Its time, and what that is of the roofline."""
    seconds = time_s(case.run)
    return Line(
        case.op, case.shape, seconds * 1e6, case.nbytes / seconds / 1e9,
        case.operations / seconds / 1e12, roof.time_s(case) / seconds,
    )  # fmt: skip


def run(json_path: str | None) -> None:
    """Measure all on the current device."""
    device = torch.device("cuda")
    roof = roof_of(device)
    print(
        f"{torch.cuda.get_device_name(device)}: {roof.gigabytes_per_s:.0f} GB/s, "
        f"{roof.teraflops_16:.0f} TFLOP/s in 16 bits, {roof.teraflops_32:.0f} in FP32 "
        f"({roof.source})"
    )
    print(f"{'op':36} {'shape':30} {'us':>9} {'GB/s':>7} {'TFLOP/s':>8} {'roofline':>8}")
    lines = []
    for case in all_cases(device):
        line = measure(case, roof)
        lines.append(line)
        print(
            f"{line.op:36} {line.shape:30} {line.microseconds:9.1f} {line.gigabytes_per_s:7.0f} "
            f"{line.teraflops:8.1f} {line.roofline:8.0%}"
        )
    if json_path is not None:
        content = {"roof": asdict(roof), "lines": [asdict(line) for line in lines]}
        Path(json_path).write_text(json.dumps(content, indent=1))


def tune() -> None:
    """Tries tiles for the products of `product_cases`, and prints lines for the table."""
    make, device = Maker(torch.device("cuda")), torch.device("cuda")
    name = torch.cuda.get_device_name(device)
    for columns, depth in ((6144, 4096), (4096, 4096), (4096, 14336)):
        weight, best = make.values(depth, columns), []
        key = (name, columns, depth, "bfloat16")
        for height, rows in ((tiles.FEW_ROWS, 16), (tiles.MANY_ROWS, 2048)):
            x, times = make.values(rows, depth), {}
            for block_n, block_k, stages in product((32, 64, 128), (32, 64, 128), (2, 3, 4)):
                tile = tiles.Tile(height, block_n, block_k, 2, stages)
                tiles.TUNED[key] = (tile, tile)
                tiles.forget()
                try:
                    times[tile] = time_s(lambda x=x, w=weight: linear.linear(x, w))
                except RuntimeError as error:  # too much shared memory
                    print(f"# {tile}: {error}")
            best.append(min(times, key=lambda tile: times[tile]))
        print(f"    {key}: ({best[0]}, {best[1]}),")
