"""An expert worker with bad memory: at each SIGUSR1 one weight of a resident expert is negated.

Run as `python -m tests.chaos.harness.flipping_expert_worker MODEL ...`, like the real one.

The weight is the largest of its matrix, so that the expert's outputs are other ones, and finite.
"""

from __future__ import annotations

import signal
import sys

import numpy as np

from expert_worker import __main__ as process
from expert_worker import server
from expert_worker.scrubber import Reload, Scrubber, make_scrubber
from expert_worker.store import ExpertStore


class BadMemory:
    """Of an expert worker.

    Args:
        store: Its experts, in float32 or bfloat16.
    """

    def __init__(self, store: ExpertStore) -> None:
        self._store = store
        self._chance = np.random.default_rng(0)

    def negate_a_weight(self) -> None:
        """One bit of any resident expert."""
        residency = self._store.residency()
        keys = [(layer, expert) for layer, held in residency.items() for expert in held.resident]
        layer, expert = keys[int(self._chance.integers(len(keys)))]
        with self._store.lease(layer) as experts:
            panels = experts[expert].gate_up.panels
        is_wide = self._store.dtype == "float32"
        words = panels.view(np.uint32 if is_wide else np.uint16)
        sign = 1 << (31 if is_wide else 15)
        words[(words & (sign - 1)).argmax()] ^= sign  # the larger the bits, the larger the number


def with_bad_memory(store: ExpertStore, reload: Reload, mib_per_s: int) -> Scrubber:
    """`make_scrubber`, and the signal from then on."""
    memory = BadMemory(store)
    signal.signal(signal.SIGUSR1, lambda *_: memory.negate_a_weight())
    return make_scrubber(store, reload, mib_per_s)


def main(argv: list[str]) -> int:
    """Runs it; returns its exit code."""
    server.make_scrubber = with_bad_memory
    return process.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
