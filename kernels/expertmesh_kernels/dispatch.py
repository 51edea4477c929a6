"""Which rows go to which expert worker, and rows moved into messages and out of them.

T tokens, K top-k, E experts, W expert workers, R rows and N (row, expert) pairs of a message, S =
T * K slots, H hidden size. Runs on the host, in one kernel each: no Python per token or expert.
Elements are moved as raw bits: uint16 for bfloat16 and float16, uint32 for float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from expertmesh.model_config import DtypeName
from expertmesh_kernels.cpu import dispatch as cpu
from expertmesh_kernels.host import as_input

Bits = NDArray[np.uint16] | NDArray[np.uint32]
Bools = NDArray[np.bool_]

BITS_DTYPES: Mapping[DtypeName, type[np.uint16] | type[np.uint32]] = {
    "float32": np.uint32,
    "bfloat16": np.uint16,
    "float16": np.uint16,
}
EXPONENTS: Mapping[DtypeName, int] = {
    "float32": 0x7F80_0000,
    "bfloat16": 0x7F80,
    "float16": 0x7C00,
}


def as_bits(array: NDArray[np.generic], dtype: DtypeName) -> Bits:
    """The memory of an array as the bits of its elements."""
    return cast(Bits, array.view(BITS_DTYPES[dtype]))


def empty_bits(shape: tuple[int, int], dtype: DtypeName) -> Bits:
    """An array for the bits of elements."""
    return cast(Bits, np.empty(shape, BITS_DTYPES[dtype]))


@dataclass(frozen=True)
class WorkerRows:
    """What one expert worker gets: each token row once, and its experts in CSR form.

    Row i of the message has the experts expert_ids_N[row_offsets[i] : row_offsets[i + 1]].
    """

    worker: int
    row_ids_R: NDArray[np.int64]
    """Rows of the batch, ascending."""
    row_offsets: NDArray[np.uint32]
    """[R + 1]."""
    expert_ids_N: NDArray[np.uint32]
    """Strictly increasing inside a row."""
    slot_ids_N: NDArray[np.int64]
    """Where output n belongs in slot order: t * K + j."""
    num_generated_rows: int
    """Leading rows that belong to generated tokens."""


def plan_dispatch(
    topk_ids_TK: NDArray[np.int32],
    worker_of_expert_E: NDArray[np.int32],
    num_generated_rows: int,
) -> list[WorkerRows]:
    """Split a batch's routing by expert worker; only those with rows, in ascending order.

    Args:
        topk_ids_TK: Chosen experts, different within a row.
        worker_of_expert_E: Expert worker of each expert; pairs of those below 0 are left out.
        num_generated_rows: Leading rows of the batch that belong to generated tokens.
    """
    num_pairs = topk_ids_TK.size
    ids_TK = as_input(topk_ids_TK, np.int32)
    worker_of_expert_E = as_input(worker_of_expert_E, np.int32)
    num_workers = int(worker_of_expert_E.max()) + 1
    counts_W3 = np.zeros((num_workers, 3), np.int64)
    cpu.count_rows(ids_TK, worker_of_expert_E, num_generated_rows, counts_W3)
    row_ids = np.empty(num_pairs, np.int64)
    row_offsets = np.empty(num_pairs + num_workers, np.uint32)
    expert_ids = np.empty(num_pairs, np.uint32)
    slot_ids = np.empty(num_pairs, np.int64)
    cpu.fill_rows(ids_TK, worker_of_expert_E, counts_W3, row_ids, row_offsets, expert_ids, slot_ids)
    plan, row, pair = [], 0, 0
    for worker, (rows, pairs, generated) in enumerate(counts_W3.tolist()):
        if rows:
            plan.append(
                WorkerRows(
                    worker,
                    row_ids[row : row + rows],
                    row_offsets[row + worker : row + worker + rows + 1],
                    expert_ids[pair : pair + pairs],
                    slot_ids[pair : pair + pairs],
                    generated,
                )
            )
        row, pair = row + rows, pair + pairs
    return plan


def gather_rows(
    source_TH: Bits, row_ids_R: NDArray[np.int64], dtype: DtypeName, out_RH: Bits, broken_T: Bools
) -> bool:
    """Copy chosen rows into a message; True if all are finite.

    A row that is not finite must harm its own request only: zeros travel in its place.

    Args:
        source_TH: Rows of the batch.
        row_ids_R: Which of them.
        dtype: What the bits are.
        out_RH: Takes the rows.
        broken_T: True is set for rows with a NaN or infinite element.
    """
    return not cpu.gather_rows(source_TH, row_ids_R, EXPONENTS[dtype], out_RH, broken_T)


def scatter_rows(
    source_NH: Bits, slot_ids_N: NDArray[np.int64], dtype: DtypeName, out_SH: Bits
) -> bool:
    """Copy outputs to their slots; False if an element is NaN or infinite.

    Args:
        source_NH: Outputs of a reply, in the order of the pairs; may be read-only.
        slot_ids_N: Where they belong.
        dtype: What the bits are.
        out_SH: Takes the outputs.
    """
    return cpu.scatter_rows(source_NH, slot_ids_N, EXPONENTS[dtype], out_SH)


@dataclass(frozen=True)
class CallRows:
    """Rows and pairs of one call, as the kernels of experts take them."""

    row_of_pair_N: NDArray[np.int64]
    expert_of_pair_N: NDArray[np.int64]


def unpack_call(
    rows_RH: Bits,
    row_offsets: NDArray[np.uint32],
    expert_ids_N: NDArray[np.uint32],
    num_experts: int,
    top_k: int,
    dtype: DtypeName,
    out_RH: Bits,
) -> CallRows | None:
    """Check what came in a call and copy it; None if anything is wrong.

    Args:
        rows_RH: Hidden states; may be read-only, as the next two.
        row_offsets: CSR offsets; must be [R + 1], rise from 0 and end with N.
        expert_ids_N: Must rise within a row.
        num_experts: Ids must be below.
        top_k: Most experts of a row.
        dtype: What the bits are; none of them NaN or infinite.
        out_RH: Takes the rows.
    """
    rows = CallRows(np.empty(expert_ids_N.size, np.int64), np.empty(expert_ids_N.size, np.int64))
    is_right = cpu.unpack_call(
        rows_RH, row_offsets, expert_ids_N, num_experts, top_k, EXPONENTS[dtype],
        out_RH, rows.row_of_pair_N, rows.expert_of_pair_N,
    )  # fmt: skip
    return rows if is_right else None


def unpack_pairs(
    num_rows: int,
    row_offsets: NDArray[np.uint32],
    expert_ids_N: NDArray[np.uint32],
    num_experts: int,
    top_k: int,
) -> CallRows | None:
    """The part of `unpack_call` without the rows."""
    rows = CallRows(np.empty(expert_ids_N.size, np.int64), np.empty(expert_ids_N.size, np.int64))
    is_right = cpu.unpack_pairs(
        num_rows, row_offsets, expert_ids_N, num_experts, top_k,
        rows.row_of_pair_N, rows.expert_of_pair_N,
    )  # fmt: skip
    return rows if is_right else None
