"""Who goes first where there are fewer cores than threads that want one.

Each thread has a niceness of its own on Linux. One that lowers its priority can rarely raise it
again (that takes privileges), so work that others go before gets a thread for itself.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

T = TypeVar("T")


def stay_behind(niceness: int) -> None:
    """From now on the calling thread, and what it starts, has a core when others leave it one.

    Args:
        niceness: How much is added to its own; 10 means a tenth of a core that another wants. The
            system knows the most there is. Nothing happens where threads have no priorities.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        nicer = os.getpriority(os.PRIO_PROCESS, thread) + niceness
        os.setpriority(os.PRIO_PROCESS, thread, nicer)


def run_behind(niceness: int, work: Callable[[], T]) -> T:
    """What `work` returns or raises, done in a thread that stays behind; the caller waits.

    The caller keeps its priority, and so do the threads that it starts afterwards.
    """
    with ThreadPoolExecutor(1, "start", partial(stay_behind, niceness)) as start:
        return start.submit(work).result()
