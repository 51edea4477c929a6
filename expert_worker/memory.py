"""How much memory there is for experts; gives freed memory back to the system."""

from __future__ import annotations

import ctypes

import torch

from expert_worker.store import ExpertStore, ExpertStoreError
from expertmesh.host_memory import available_host_memory

_SHARE = 0.9
"""Of free memory that experts may take; the rest is for calls and for an expert that is read."""
_LOADING_FACTOR = 3
"""Host memory that loading an expert takes, in experts: as it is read, put together, and packed."""


def affordable_slots(store: ExpertStore) -> int:
    """Experts that free memory has room for, at least one, beside those that are held."""
    free_bytes = available_host_memory()
    if store.device.type == "cuda":
        free_bytes = int(torch.cuda.mem_get_info(store.device)[0])
    return max(1, int(free_bytes * _SHARE) // max(1, store.bytes_per_expert))


def check_memory(store: ExpertStore) -> None:
    """Refuses to load another expert before the system would end the process.

    Raises:
        ExpertStoreError: Too little memory.
    """
    free, needed = available_host_memory(), _LOADING_FACTOR * store.bytes_per_expert
    if free < needed:
        raise ExpertStoreError(
            f"too little memory to load an expert: {free / 2**20:.1f} MiB are free, and it may "
            f"take {needed / 2**20:.1f} MiB"
        )


def give_back_freed_memory() -> None:
    """Returns what loading used in passing; the C library would keep it. May take milliseconds.

    Without glibc nothing happens.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
