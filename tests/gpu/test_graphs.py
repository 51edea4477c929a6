"""Every kernel in a CUDA graph: captured once, replayed on other inputs, equal to a plain call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from expertmesh.model_config import SILU, GateConfig, KvLayout
from expertmesh_kernels.triton import (
    activation,
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
)
from expertmesh_kernels.triton.weights import plain, table_of
from tests.unit.kernels.triton.test_small import random

pytestmark = pytest.mark.gpu

ROWS, HIDDEN = 6, 64


@dataclass(frozen=True)
class Call:
    """An op, the tensors that change between replays, and how to draw them."""

    run: Callable[..., Tensor]
    inputs: list[Tensor]
    redraw: Callable[[int], list[Tensor]]


def floats(*shapes: tuple[int, ...]) -> Callable[[int], list[Tensor]]:
    """Draws float32 tensors."""
    return lambda seed: [random(*shape, seed=seed + i) for i, shape in enumerate(shapes)]


def integers(high: int, count: int) -> Callable[[int], list[Tensor]]:
    """Draws int32 tensors below a bound, by seed."""
    return lambda seed: [
        torch.randint(0, high, (count,), generator=torch.Generator().manual_seed(seed)).int()
    ]


def _linear(device: torch.device) -> Call:
    weight = random(HIDDEN, 48).to(device)
    return _call(device, floats((ROWS, HIDDEN)), lambda x: linear.linear(x, weight))


def _experts(device: torch.device) -> Call:
    """The experts of pairs change: some have many, some none."""
    gate_up = [plain(random(HIDDEN, 64, seed=e).to(device)) for e in range(8)]
    down = [plain(random(32, HIDDEN, seed=e).to(device)) for e in range(8)]
    tables = grouped_mlp.MlpTables(table_of(gate_up), table_of(down))
    rows = torch.arange(40, device=device) % ROWS
    x = random(ROWS, HIDDEN).to(device)
    kept = gate_up, down

    def run(experts: Tensor) -> Tensor:
        assert kept
        return grouped_mlp.grouped_mlp(x, rows, experts, tables, SILU)

    return _call(device, integers(8, 40), run)


def _order(device: torch.device) -> Call:
    return _call(
        device, integers(8, 40), lambda experts: order.order_by_expert(experts, 8, 4).pairs
    )


def _route(device: torch.device) -> Call:
    weight = random(HIDDEN, 8).to(device)
    gate = GateConfig(8, 2)
    return _call(
        device, floats((ROWS, HIDDEN)), lambda x: router.route_rows(x, weight, gate).topk_weights_TK
    )


def _attention(device: torch.device) -> Call:
    """Decode: positions change, so the number of splits that a row sees does."""
    layout = KvLayout(2, 16, 16)
    pages = kv.DevicePages(random(200, layout.width * 16).to(device), 0, layout, 16)
    tables = (torch.arange(ROWS * 100, device=device).int() % 200).view(ROWS, 100)
    own = torch.arange(ROWS, device=device, dtype=torch.int32)
    tiles = attention.RowTiles(own, torch.ones_like(own), 1)
    q = random(ROWS, 4, 16).to(device)
    scores = attention.Scores(0.25, 16)
    return _call(
        device,
        integers(1600, ROWS),
        lambda at: attention.paged_attention(q, pages, tables, own, at, tiles, scores, 1600),
    )


def _write_kv(device: torch.device) -> Call:
    layout = KvLayout(2, 16, 16)
    pages = kv.DevicePages(torch.zeros(8, layout.width * 16, device=device), 0, layout, 16)
    slots = torch.tensor([5, 99, 3, 64, 17, -1], device=device)

    def run(k: Tensor, v: Tensor) -> Tensor:
        kv.write_kv(k, v, pages, slots)
        return pages.pool.clone()

    return _call(device, floats((ROWS, 2, 16), (ROWS, 2, 16)), run)


def _rope(device: torch.device) -> Call:
    cos, sin = random(50, 8).to(device), random(50, 8, seed=1).to(device)
    x = random(ROWS, 4, 16).to(device)

    def run(positions: Tensor) -> Tensor:
        rotated = x.clone()
        rope.apply_rope(rotated, positions, cos, sin, interleaved=False)
        return rotated

    return _call(device, integers(50, ROWS), run)


def _sample(device: torch.device) -> Call:
    ones = torch.ones(ROWS, device=device)
    settings = (
        ones * torch.tensor([0, 1, 1, 1, 2, 1], device=device), ones * 0.01,
        ones * torch.tensor([1, 1, 0.9, 1, 0.5, 1], device=device),
        torch.tensor([0, 5, 0, 0, 50, 1], device=device).int(),
        torch.arange(ROWS, device=device), torch.arange(ROWS, device=device) + 7,
    )  # fmt: skip
    return _call(device, floats((ROWS, 999)), lambda logits: sampling.sample(logits, *settings))


def _norm(device: torch.device) -> Call:
    weight = random(HIDDEN, seed=9).to(device)
    return _call(device, floats((ROWS, HIDDEN)), lambda x: norm.rms_norm(x, weight, 1e-5))


def _combine(device: torch.device) -> Call:
    return _call(device, floats((ROWS * 2, HIDDEN), (ROWS, 2)), combine.combine)


def _activation(device: torch.device) -> Call:
    run = partial(activation.gated_activation, activation=SILU)
    return _call(device, floats((ROWS, HIDDEN)), run)


def _call(
    device: torch.device, draw: Callable[[int], list[Tensor]], run: Callable[..., Tensor]
) -> Call:
    def redraw(seed: int) -> list[Tensor]:
        return [tensor.to(device) for tensor in draw(seed)]

    return Call(run, redraw(0), redraw)


OPS = [
    _linear, _experts, _order, _route, _attention, _write_kv, _rope, _sample, _norm, _combine,
    _activation,
]  # fmt: skip


@pytest.mark.parametrize("make", OPS, ids=lambda make: make.__name__[1:])
def test_a_replay_computes_what_a_call_computes(
    make: Callable[[torch.device], Call], device: torch.device
) -> None:
    """Nothing on the host depends on values, so a graph serves all of them."""
    call = make(device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call.run(*call.inputs)  # compiles, which a capture does not allow
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call.run(*call.inputs)
    for seed in (10, 20):
        fresh = call.redraw(seed)
        for tensor, values in zip(call.inputs, fresh, strict=True):
            tensor.copy_(values)
        graph.replay()
        replayed = captured.clone()
        assert torch.equal(replayed, call.run(*fresh))
