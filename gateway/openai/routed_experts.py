"""Experts of tokens as text: base64 of a .npy, as researchers' tools read them."""

from __future__ import annotations

import base64
import io

import numpy as np
import numpy.typing as npt

from expertmesh.model_config import ModelConfig


def encode_routed_experts(
    experts_TLK: npt.NDArray[np.uint16], config: ModelConfig, *, skip: int = 0
) -> str:
    """Experts of every token but the last.

    Args:
        experts_TLK: [tokens - 1, MoE layers, top-k].
        config: Says whether a byte holds an expert's number.
        skip: Leading tokens that are left out.
    """
    dtype = np.uint8 if config.num_experts <= 256 else np.uint16
    data = io.BytesIO()
    np.save(data, np.ascontiguousarray(experts_TLK[skip:], dtype=dtype), allow_pickle=False)
    return base64.b64encode(data.getvalue()).decode("ascii")
