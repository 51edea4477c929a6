"""An expert worker on a pretended device: `python -m tests.chaos.harness.timed_expert_worker ...`.

Shared cores cannot show what balance is worth: a worker with little to do leaves its core to the
others. Here each call keeps the worker's own device busy, without a core, for

    EXPERTMESH_TIMED_EXPERT_US * (distinct experts of the call) + EXPERTMESH_TIMED_CALL_US

as a device does that is bound by reading weights. Outputs are computed as always, after the rest of
the arguments, which are those of `python -m expert_worker`; give `--direct-port -1`, since compiled
calls would not come by here.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np
import numpy.typing as npt
from torch import Tensor

import expert_worker.server
from expert_worker.__main__ import main
from expert_worker.backend import ExpertBackend
from expert_worker.device_queue import Job

EXPERT_US, CALL_US = "EXPERTMESH_TIMED_EXPERT_US", "EXPERTMESH_TIMED_CALL_US"


class TimedBackend(ExpertBackend):
    """Takes as long as the environment says."""

    def _run_pairs(
        self,
        like: Job,
        x_RH: Tensor,
        row_of_pair_N: npt.NDArray[np.int64],
        expert_of_pair_N: npt.NDArray[np.int64],
    ) -> Tensor:
        end_s = time.monotonic() + _busy_s(len(np.unique(expert_of_pair_N)))
        outputs_NH = super()._run_pairs(like, x_RH, row_of_pair_N, expert_of_pair_N)
        time.sleep(max(0.0, end_s - time.monotonic()))
        return outputs_NH


def _busy_s(num_experts: int) -> float:
    return (float(os.environ[EXPERT_US]) * num_experts + float(os.environ[CALL_US])) / 1e6


if __name__ == "__main__":
    vars(expert_worker.server)[ExpertBackend.__name__] = TimedBackend
    sys.stderr.write("a pretended device: times mean nothing beyond a comparison\n")
    sys.exit(main(sys.argv[1:]))
