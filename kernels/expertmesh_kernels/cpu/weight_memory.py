"""Memory for weights on huge pages, whatever the heap looks like.

Decoding is bound by reading weights, and on a virtual machine, where a TLB miss walks two page
tables, 4 KiB pages were read up to 12 times slower than huge ones (docs/log.md). A heap that has
seen frees serves a good part of the weights from small pages; so they get mappings of their own.

Blocks are cut from mappings of 64 MiB. A block that is freed is used again for one of the same
size, as experts are; a mapping whose blocks are all free goes back to the system.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE_PAGE = 2 * 2**20
_MAPPING = 32 * HUGE_PAGE
_ALIGNMENT = 64  # a cache line, and the row of a tile


class _Mapping:
    """Memory from the system, cut from the front."""

    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(
            -1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )  # shared memory, the default, is not given huge pages
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        self.next = -address % HUGE_PAGE
        self.end = self.next + size
        self.num_used = 0


class WeightMemory:
    """Hands out tensors on huge pages. Safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run while it is held
        self._current: _Mapping | None = None
        self._free: dict[int, list[tuple[_Mapping, int]]] = defaultdict(list)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor whose elements are not set."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        size = -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            mapping, at = self._take(size)
            mapping.num_used += 1
        block = memoryview(mapping.memory)[at : at + size]
        weakref.finalize(block, self._give_back, mapping, at, size).atexit = False
        return torch.frombuffer(block, dtype=dtype, count=count).view(*shape)

    def _take(self, size: int) -> tuple[_Mapping, int]:
        if self._free[size]:
            return self._free[size].pop()
        current = self._current
        if current is None or current.next + size > current.end:
            rounded = -(-size // HUGE_PAGE) * HUGE_PAGE
            current = _Mapping(max(_MAPPING, rounded))
            self._current = current
        at = current.next
        current.next += size
        return current, at

    def _give_back(self, mapping: _Mapping, at: int, size: int) -> None:
        with self._lock:
            mapping.num_used -= 1
            self._free[size].append((mapping, at))
            if mapping.num_used or mapping is self._current:
                return
            for blocks in self._free.values():
                blocks[:] = [block for block in blocks if block[0] is not mapping]


weight_memory = WeightMemory()
"""Of this process: packing happens in many places, and a mapping serves them all."""
