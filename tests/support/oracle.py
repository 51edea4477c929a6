"""The reference: transformers on the CPU, in FP32, one sequence at a time, eager attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

MIN_MARGIN = 1e-3
"""Greedy tokens are compared only where the reference prefers its choice by more than this."""


@dataclass(frozen=True)
class Continuation:
    """Greedy tokens of the reference."""

    token_ids: tuple[int, ...]
    logprobs: npt.NDArray[np.float32]
    """[tokens] of the chosen tokens."""
    margins: npt.NDArray[np.float32]
    """[tokens] logit of the chosen token less the second best."""


class Oracle:
    """A checkpoint as transformers computes it.

    Args:
        model_dir: Checkpoint folder.
    """

    def __init__(self, model_dir: Path) -> None:
        self._use(
            AutoModelForCausalLM.from_pretrained(
                model_dir, dtype=torch.float32, attn_implementation="eager"
            )
        )

    @classmethod
    def of(cls, model: PreTrainedModel) -> Oracle:
        """A model of transformers that is in memory, in FP32 and with eager attention."""
        oracle = cls.__new__(cls)
        oracle._use(model.float())
        return oracle

    def _use(self, model: PreTrainedModel) -> None:
        self.model = model.eval()
        self.vocab_size = int(model.config.vocab_size)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> Continuation:
        """Greedy continuation that does not stop at an end token."""
        token_ids: list[int] = []
        logprobs: list[float] = []
        margins: list[float] = []
        fed = torch.tensor([list(prompt)])
        cache = None
        with torch.inference_mode():
            for _ in range(num_tokens):
                output = self.model(fed, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                logits_V = output.logits[0, -1].float()
                best, second = logits_V.topk(2).values
                token = int(logits_V.argmax())
                token_ids.append(token)
                logprobs.append(float(logits_V.log_softmax(-1)[token]))
                margins.append(float(best - second))
                fed = torch.tensor([[token]])
        return Continuation(
            tuple(token_ids), np.array(logprobs, np.float32), np.array(margins, np.float32)
        )

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """[T, V] logits after each token, teacher-forced."""
        with torch.inference_mode():
            output = self.model(torch.tensor([list(token_ids)]), use_cache=False)
        result: npt.NDArray[np.float32] = output.logits[0].float().numpy()
        return result

    def follow(self, prompt: Sequence[int], answer: Sequence[int]) -> Continuation:
        """What the reference would choose after the prompt and each piece of the answer.

        Equal to `greedy(prompt, len(answer))` if, and only if, its tokens are those of the answer;
        one pass over all tokens instead of one per token.
        """
        logits_TV = torch.from_numpy(self.logits([*prompt, *answer][:-1])[len(prompt) - 1 :])
        token_ids_T = logits_TV.argmax(-1)
        best_T2 = logits_TV.topk(2).values
        logprobs_TV = logits_TV.log_softmax(-1)
        return Continuation(
            tuple(token_ids_T.tolist()),
            logprobs_TV.gather(1, token_ids_T[:, None])[:, 0].numpy(),
            (best_T2[:, 0] - best_T2[:, 1]).numpy(),
        )

    def routing(self, token_ids: Sequence[int], top_k: int) -> list[npt.NDArray[np.int64]]:
        """[T, K] experts of each token, for each MoE layer, from the gate's own logits."""
        with torch.inference_mode():
            output = self.model(
                torch.tensor([list(token_ids)]), use_cache=False, output_router_logits=True
            )
        return [logits_TE.float().topk(top_k).indices.numpy() for logits_TE in output.router_logits]


def prompts(vocab_size: int, lengths: Sequence[int], *, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths, free of the special tokens 0 to 2."""
    generator = np.random.default_rng(seed)
    return [generator.integers(3, vocab_size, length).tolist() for length in lengths]
