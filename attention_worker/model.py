"""The forward pass of a decoder-only transformer: blocking Python that reads top to bottom.

A model is data: its layers are objects made by `loader.py` from `ModelConfig`; nothing here knows
a family. All math goes through `expertmesh_kernels`, apart from gathers and residual additions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attention_worker.batch import Batch
from attention_worker.layers.attention import Attention
from attention_worker.layers.ffn import ExpertCalls, Ffn
from attention_worker.layers.logits import LogitsEdit
from attention_worker.layers.norm import Norm
from attention_worker.model_states.paged_kv import AttentionInputs
from expertmesh.model_config import ModelConfig
from expertmesh_kernels.linear import PackedLinear, linear


@dataclass(frozen=True)
class DecoderLayer:
    """x += out_norm(attention(input_norm(x))); x += out_norm(ffn(ffn_norm(x)))."""

    input_norm: Norm
    attention: Attention
    attention_out_norm: Norm
    ffn_norm: Norm
    ffn: Ffn
    ffn_out_norm: Norm


@dataclass(frozen=True)
class Model:
    """Weights of everything but the experts, in the order of use."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    embed_VH: Tensor
    """Scaled as the model wants it."""
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    lm_head: PackedLinear
    logits_edits: tuple[LogitsEdit, ...] = ()
    """Applied in order to what `lm_head` gives."""

    def forward(self, batch: Batch, inputs: AttentionInputs, calls: ExpertCalls) -> Tensor:
        """Hidden states after the last layer, [T, H]; keys and values of all rows are written.

        Raises:
            ExpertUnavailableError: A routed expert has no usable copy within its deadline.
        """
        x_TH = self.embed_VH[batch.token_ids_T]
        for layer in self.layers:
            mixed_TH = layer.attention(layer.input_norm(x_TH), inputs)
            x_TH = x_TH + layer.attention_out_norm(mixed_TH)
            out_TH = layer.ffn(layer.ffn_norm(x_TH), calls)
            x_TH = x_TH + layer.ffn_out_norm(out_TH)
        return x_TH

    def logits(self, x_TH: Tensor, rows_R: npt.NDArray[np.int64]) -> Tensor:
        """Logits of some rows of hidden states, float32 [R, V]."""
        x_RH = self.norm(x_TH[torch.from_numpy(rows_R).to(x_TH.device)])
        logits_RV = linear(x_RH, self.lm_head, out_dtype=torch.float32)
        for edit in self.logits_edits:
            edit(logits_RV)
        return logits_RV
