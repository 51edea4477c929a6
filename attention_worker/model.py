"""The forward pass of a decoder-only transformer: blocking Python that reads top to bottom.

A model is data: its layers are objects made by `loader.py` from `ModelConfig`; nothing here knows
a family. All math goes through `expertmesh_kernels`, apart from gathers and residual additions.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attention_worker.layers.attention import Attention
from attention_worker.layers.attention_half import FirstHalf, first_half
from attention_worker.layers.ffn import ExpertCalls, Ffn
from attention_worker.layers.logits import LogitsEdit
from attention_worker.layers.norm import Norm, ResidualNorm
from attention_worker.model_states.paged_kv import AttentionInputs
from attention_worker.stages import Stage
from expertmesh.model_config import ModelConfig
from expertmesh_kernels.linear import PackedLinear, linear


@dataclass(frozen=True)
class DecoderLayer:
    """x += out_norm(attention(input_norm(x))); x += out_norm(ffn(ffn_norm(x)))."""

    input_norm: ResidualNorm
    attention: Attention
    attention_out_norm: Norm
    ffn_norm: ResidualNorm
    ffn: Ffn
    ffn_out_norm: Norm

    @cached_property
    def first_half(self) -> FirstHalf:
        """The first equation, and what the second one reads."""
        return first_half(self.attention, self.attention_out_norm, self.ffn_norm)


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
    norm: ResidualNorm
    lm_head: PackedLinear
    logits_edits: tuple[LogitsEdit, ...] = ()
    """Applied in order to what `lm_head` gives."""

    def layer_by_layer(
        self,
        token_ids_T: Tensor,
        inputs: AttentionInputs,
        calls: ExpertCalls,
        stages: Sequence[Stage],
    ) -> Generator[None, None, Tensor]:
        """Normalised hidden states after the last layer, [T, H]; the rows' keys and values are
        written. Pauses in every layer whose rows travel.

        Args:
            token_ids_T: Of the rows.
            inputs: Where they find keys and values.
            calls: How MoE layers reach their experts.
            stages: All layers, in the pieces of `choose_stages`.

        Raises:
            ExpertUnavailableError: A routed expert has no usable copy within its deadline.
        """
        x_TH = self.embed_VH[token_ids_T]
        rows = x_TH, self.layers[0].input_norm(x_TH)
        for stage in stages:
            rows = yield from stage.run(rows, inputs, calls)
        return rows[1]

    @cached_property
    def next_norms(self) -> tuple[ResidualNorm, ...]:
        """What reads the residual stream after each layer."""
        return (*(layer.input_norm for layer in self.layers[1:]), self.norm)

    def logits(self, h_TH: Tensor, rows_R: npt.NDArray[np.int64]) -> Tensor:
        """Logits of some rows of what `layer_by_layer` gave, float32 [R, V]."""
        h_RH = h_TH[torch.from_numpy(rows_R).to(h_TH.device)]
        logits_RV = linear(h_RH, self.lm_head, out_dtype=torch.float32)
        for edit in self.logits_edits:
            edit(logits_RV)
        return logits_RV
