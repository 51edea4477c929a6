"""Gives freed memory back to the system."""

from __future__ import annotations

import ctypes


def give_back_freed_memory() -> None:
    """Returns what loading used in passing; the C library would keep it. May take milliseconds.

    Without glibc nothing happens.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
