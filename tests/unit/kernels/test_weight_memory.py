"""Memory for weights: aligned, apart, used again, given back."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch

from expertmesh_kernels.cpu.weight_memory import HUGE_PAGE, WeightMemory
from expertmesh_kernels.linear import pack_linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_tensors_are_aligned_and_apart(dtype: torch.dtype) -> None:
    """Each keeps what is written to it, in any size, also beyond a mapping."""
    memory = WeightMemory()
    shapes = [(3,), (0, 5), (7, 11), (1000, 1000), (40 * HUGE_PAGE,), (2, 2)]
    tensors = [memory.empty(shape, dtype) for shape in shapes]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    for value, (shape, tensor) in enumerate(zip(shapes, tensors, strict=True)):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        assert bool((tensor == value).all())


def test_a_freed_block_is_used_again_for_the_same_size_alone() -> None:
    """A view keeps the block; no other size gets it."""
    memory = WeightMemory()
    first = memory.empty((1000,), torch.float32)
    address, view = first.data_ptr(), first[500:]
    del first
    gc.collect()
    assert memory.empty((1000,), torch.float32).data_ptr() != address
    del view
    gc.collect()
    assert memory.empty((500,), torch.float32).data_ptr() != address
    found = [memory.empty((1000,), torch.float32) for _ in range(3)]
    assert address in [tensor.data_ptr() for tensor in found]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_without_blocks_goes_back_to_the_system() -> None:
    """Hundreds of MiB that were touched and freed are not resident any more."""
    memory = WeightMemory()
    before = _resident_bytes()
    tensors = [memory.empty((8 * HUGE_PAGE,), torch.uint8).fill_(1) for _ in range(20)]
    assert _resident_bytes() - before > 19 * 8 * HUGE_PAGE
    tensors.clear()
    gc.collect()
    assert _resident_bytes() - before < 5 * 8 * HUGE_PAGE


def test_packed_weights_are_on_huge_pages() -> None:
    """Where the system has them to give."""
    text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    if "[never]" in text:
        pytest.skip("transparent huge pages are off")
    packed = [pack_linear(torch.ones(4096, 1024).bfloat16()) for _ in range(16)]
    first, last = packed[1].weight.data_ptr(), packed[-2].weight.data_ptr()
    maps = Path("/proc/self/smaps").read_text()
    areas = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?AnonHugePages: +(\d+) kB", maps, re.M | re.S)
    huge = [
        int(kilobytes) * 1024
        for low, high, kilobytes in areas
        if int(low, 16) <= first < int(high, 16) or int(low, 16) <= last < int(high, 16)
    ]
    assert sum(huge) >= 32 * HUGE_PAGE
