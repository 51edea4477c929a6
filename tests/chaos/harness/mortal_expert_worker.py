"""An expert worker with a bug: a row whose first element outweighs all others ends it at once.
`python -m tests.chaos.harness.mortal_expert_worker MODEL ...`, with the arguments of the real one.
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np
import numpy.typing as npt
from torch import Tensor

from expert_worker import __main__ as process
from expert_worker import backend, server
from expertmesh.model_config import Activation
from expertmesh_kernels.grouped_mlp import ExpertTable, grouped_mlp

SHARE = 0.9
"""Of the square of a row; no row of an ordinary token comes near."""


def mortal(
    x_RH: Tensor,
    row_of_pair_N: npt.NDArray[np.int64],
    expert_of_pair_N: npt.NDArray[np.int64],
    experts: ExpertTable,
    activation: Activation,
) -> Tensor:
    """`grouped_mlp` with the bug."""
    squares_RH = x_RH.float() ** 2
    if bool((squares_RH[:, 0] > SHARE * squares_RH.sum(dim=1)).any()):
        os.kill(os.getpid(), signal.SIGKILL)
    return grouped_mlp(x_RH, row_of_pair_N, expert_of_pair_N, experts, activation)


def main(argv: list[str]) -> int:
    """Runs it; returns its exit code."""
    backend.grouped_mlp = mortal
    server._runs_compiled = lambda store: False  # Python answers calls, with the function above
    return process.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
