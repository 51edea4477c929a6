"""What exactness costs: `python -m bench.exactness [--threads N] [--repeat N]`.

Experts of a layer as the mesh computes them, with bits that do not depend on the batch, against the
same products by torch (oneDNN), whose bits do: a loop over experts with `linear`, SwiGLU, `linear`.
And the weighted sum in the order of the gate's slots against one in the order of arrival
(`index_add_`). Both in one run, in turns; medians over passes through all layers of a model.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from expertmesh.model_config import Activation
from expertmesh_kernels.combine import combine
from expertmesh_kernels.cpu.team import start_team
from expertmesh_kernels.grouped_mlp import ExpertTable, grouped_mlp, pack_expert

LAYERS, EXPERTS, TOP_K, HIDDEN, WIDE = 30, 8, 2, 576, 1536
"""The plain demo model."""
ROWS = (1, 8, 32, 512)
_SILU = Activation("silu")

Weights = tuple[Tensor, Tensor]
"""Gate and up, [2 * WIDE, HIDDEN]; down, [HIDDEN, WIDE]."""


class Batch:
    """Rows of all layers, with the experts of each."""

    def __init__(self, num_rows: int) -> None:
        rng = np.random.default_rng(num_rows)
        self.x_TH = torch.randn(num_rows, HIDDEN).bfloat16()
        self.ids_LTK = [
            np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(num_rows)])
            for _ in range(LAYERS)
        ]
        self.row_of_pair_N = np.repeat(np.arange(num_rows), TOP_K)
        self.weights_TK = torch.full((num_rows, TOP_K), 0.5)


def exact(batch: Batch, layers: list[ExpertTable]) -> None:
    """As the mesh does it."""
    for ids_TK, experts in zip(batch.ids_LTK, layers, strict=True):
        outputs_NH = grouped_mlp(
            batch.x_TH, batch.row_of_pair_N, ids_TK.reshape(-1), experts, _SILU
        )
        combine(outputs_NH, batch.weights_TK)


def loose(batch: Batch, layers: list[list[Weights]]) -> None:
    """As one would with torch."""
    for ids_TK, experts in zip(batch.ids_LTK, layers, strict=True):
        sums_TH = torch.zeros_like(batch.x_TH)
        for expert, (gate_up, down) in enumerate(experts):
            rows, slots = (torch.from_numpy(found) for found in np.nonzero(ids_TK == expert))
            if not len(rows):
                continue
            gate, up = functional.linear(batch.x_TH[rows], gate_up).chunk(2, dim=1)
            outputs = functional.linear(functional.silu(gate) * up, down)
            weights = batch.weights_TK[rows, slots].to(outputs.dtype)
            sums_TH.index_add_(0, rows, outputs * weights[:, None])


def _seconds(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    """Prints a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=9)
    options = parser.parse_args()
    start_team(options.threads)
    torch.set_num_threads(options.threads)
    weights = [[_random_expert() for _ in range(EXPERTS)] for _ in range(LAYERS)]
    packed = [
        ExpertTable({expert: pack_expert(*pair) for expert, pair in enumerate(experts)})
        for experts in weights
    ]
    print(f"{'rows':>5} {'exact ms':>9} {'torch ms':>9} {'exact / torch':>14}")
    for num_rows in ROWS:
        batch = Batch(num_rows)
        exact(batch, packed)  # compiles
        pairs = [
            (_seconds(partial(exact, batch, packed)), _seconds(partial(loose, batch, weights)))
            for _ in range(options.repeat)
        ]
        ours, theirs = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
        print(f"{num_rows:>5} {ours:>9.1f} {theirs:>9.1f} {ours / theirs:>14.2f}")


def _random_expert() -> Weights:
    return (
        torch.randn(2 * WIDE, HIDDEN).bfloat16() * 0.02,
        torch.randn(HIDDEN, WIDE).bfloat16() * 0.02,
    )


if __name__ == "__main__":
    main()
