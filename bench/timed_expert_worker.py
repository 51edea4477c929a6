"""An expert worker that computes nothing and takes the time of a device:
`python -m bench.timed_expert_worker --call-us C --expert-us K MODEL ...`.

Everything else is the real process, `python -m expert_worker`, with its arguments. A call takes
C + K * (activated experts) microseconds, one call at a time, and its outputs are zeros. So what a
device per expert worker would do can be seen on a machine where all of them share two cores: who
waits for whom, and what balance is worth. Tokens mean nothing with it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from expert_worker import __main__ as process
from expert_worker import backend, server

logger = logging.getLogger("bench.timed_expert_worker")

Compute = Callable[..., Tensor]


def timed(call_s: float, expert_s: float) -> Compute:
    """Stands in for `expertmesh_kernels.grouped_mlp.grouped_mlp`.

    Args:
        call_s: Seconds of a call.
        expert_s: Seconds of each expert that it activates.
    """

    def compute(
        x_RH: Tensor,
        row_of_pair_N: npt.NDArray[np.int64],
        expert_of_pair_N: npt.NDArray[np.int64],
        *_: object,
    ) -> Tensor:
        ends_s = time.monotonic() + call_s + expert_s * np.unique(expert_of_pair_N).size
        outputs_NH = torch.zeros(len(row_of_pair_N), x_RH.shape[1], dtype=x_RH.dtype)
        while (left_s := ends_s - time.monotonic()) > 0:
            time.sleep(left_s)
        return outputs_NH

    return compute


def main(argv: list[str]) -> int:
    """Runs it; returns its exit code."""
    parser = argparse.ArgumentParser(prog="bench.timed_expert_worker", description=__doc__)
    parser.add_argument("--call-us", type=float, required=True)
    parser.add_argument("--expert-us", type=float, required=True)
    options, rest = parser.parse_known_args(argv)
    backend.grouped_mlp = timed(options.call_us / 1e6, options.expert_us / 1e6)
    server._runs_compiled = lambda store: False  # Python answers calls, with the function above
    print(
        f"warning: this expert worker computes nothing; a call takes {options.call_us:g} us and "
        f"{options.expert_us:g} us for each activated expert",
        file=sys.stderr,
    )
    return process.main(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
