"""Which tile a matrix product uses: measured ones by device, else a rule. N columns, K depth.

A tile is chosen by the shape of the weight, which belongs to the model, and by its height: 16 rows
or 64. The height follows the number of rows, so bits must not depend on it. They do not:

* 16-bit products run on `mma.sync` with 16 steps of k per instruction, and each output is one chain
  of these in ascending k. Hopper and Blackwell have other instructions for 64 rows and 4 warps;
  so tall tiles have 2 warps here, and all devices use the same one. `tests/gpu` compares the bits.
* FP32 products are chains of fused multiply-adds in ascending k.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

FEW_ROWS = 16
"""Height of the tile for few rows: the least that a matrix instruction has."""
MANY_ROWS = 64


@dataclass(frozen=True)
class Tile:
    """What a program computes, and with what."""

    block_m: int
    block_n: int
    block_k: int
    """Steps of k per turn of the loop; it does not matter for bits."""
    num_warps: int
    """Below 4 for tiles of 64 rows: see above."""
    num_stages: int
    """Turns of the loop whose loads are in flight."""

    def __post_init__(self) -> None:
        if self.block_m >= MANY_ROWS and self.num_warps >= 4:
            raise ValueError(f"{self} would use other matrix instructions than low tiles")

    @property
    def options(self) -> dict[str, int]:
        """As kernels take it."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


TUNED: dict[tuple[str, int, int, str], tuple[Tile, Tile]] = {}
"""By device name, N, K and dtype of the weight: tiles for few and for many rows. Lines are printed
by `python bench/bench_kernels.py gpu --tune`; without one, `_rule` decides."""


def tile_for(device: torch.device, columns: int, depth: int, kind: str, rows: int) -> Tile:
    """The tile for a weight.

    Args:
        device: Where.
        columns: N.
        depth: K.
        kind: Dtype of the weight as torch names it, or its quantised format.
        rows: How many share a weight, about.
    """
    few, many = _tiles(_device_name(device), columns, depth, kind)
    return many if rows > 2 * FEW_ROWS else few


def forget() -> None:
    """Look tiles up again, as `TUNED` has changed."""
    _tiles.cache_clear()


@cache
def _tiles(device_name: str, columns: int, depth: int, kind: str) -> tuple[Tile, Tile]:
    tuned = TUNED.get((device_name, columns, depth, kind))
    return tuned or (_rule(columns, kind, FEW_ROWS), _rule(columns, kind, MANY_ROWS))


def _rule(columns: int, kind: str, height: int) -> Tile:
    """Narrow tiles where there are few columns, so that more programs share the reading."""
    if kind == "float32":
        return Tile(height, 64 if height == MANY_ROWS else 32, 32, 2, 3)
    if height == MANY_ROWS:
        return Tile(height, 64, 64, 2, 3)
    return Tile(height, 64 if columns >= 8192 else 32, 64, 2, 4)


@cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
