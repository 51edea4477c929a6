"""How tokens of one request are chosen: what a `SamplingSpec` says, checked and ready for use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from expertmesh.v1 import attention_service_pb2 as pb
from expertmesh_kernels.logits import token_bits

NOT_ASKED = -1
"""Number of log probabilities of a request that wants none."""
MAX_LIST_LEN = 4096
"""Most biases, bad words and stop tokens of a request, each."""
MAX_BAD_WORD_LEN = 8192
"""Most tokens of a bad word."""
MAX_GRAMMAR_LEN = 2**23
"""Most characters of a grammar."""


def _no_ids() -> npt.NDArray[np.int64]:
    return np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class SlotSampling:
    """Sampling parameters of one request. V vocabulary."""

    temperature: float = 1.0
    """0 means greedy."""
    min_p: float = 0.0
    """0 means all."""
    top_p: float = 1.0
    """0 < top_p <= 1."""
    top_k: int = 0
    """0 means all."""
    seed: int = 0
    """64-bit, unsigned."""
    num_logprobs: int = NOT_ASKED
    num_prompt_logprobs: int = NOT_ASKED
    routed_experts: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias_ids: npt.NDArray[np.int64] = field(default_factory=_no_ids)
    bias_values: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    bad_words: tuple[npt.NDArray[np.int64], ...] = ()
    allowed_bits: npt.NDArray[np.uint32] | None = None
    """Bit mask [ceil(V / 32)]; None for all."""
    min_tokens: int = 0
    stop_ids: npt.NDArray[np.int64] = field(default_factory=_no_ids)
    grammar: str = ""

    @property
    def penalizes(self) -> bool:
        """True if logits depend on earlier tokens by a penalty."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def masks(self) -> bool:
        """True if some tokens may be out of the question."""
        return bool(
            self.bad_words or self.allowed_bits is not None or self.min_tokens or self.grammar
        )

    @property
    def edits(self) -> bool:
        """True if logits are changed at all before a token is chosen."""
        return bool(self.bias_ids.size or self.penalizes or self.masks)


def read_sampling(spec: pb.SamplingSpec, vocab_size: int) -> SlotSampling:
    """Checked sampling parameters.

    Raises:
        ValueError: A value is out of range; names it.
    """
    _check_ranges(spec)
    if len(spec.grammar) > MAX_GRAMMAR_LEN:
        raise ValueError(
            f"grammar has {len(spec.grammar)} characters, expected at most {MAX_GRAMMAR_LEN}"
        )
    bias_ids = _ids("logit_bias", [bias.token_id for bias in spec.logit_bias], vocab_size)
    bias_values = np.array([bias.bias for bias in spec.logit_bias], np.float32)
    if not np.isfinite(bias_values).all():
        raise ValueError("logit_bias has a value that is not finite")
    allowed = _ids("allowed_token_ids", spec.allowed_token_ids, vocab_size, max_len=vocab_size)
    return SlotSampling(
        temperature=spec.temperature,
        min_p=spec.min_p,
        top_p=spec.top_p or 1.0,
        top_k=min(spec.top_k, vocab_size),
        seed=spec.seed,
        num_logprobs=_num_logprobs(spec, "num_logprobs", vocab_size),
        num_prompt_logprobs=_num_logprobs(spec, "num_prompt_logprobs", vocab_size),
        routed_experts=spec.return_routed_experts,
        repetition_penalty=spec.repetition_penalty or 1.0,
        presence_penalty=spec.presence_penalty,
        frequency_penalty=spec.frequency_penalty,
        bias_ids=bias_ids,
        bias_values=bias_values,
        bad_words=_bad_words(spec, vocab_size),
        allowed_bits=token_bits(allowed, vocab_size) if allowed.size else None,
        min_tokens=spec.min_tokens,
        stop_ids=_stop_ids(spec, vocab_size),
        grammar=spec.grammar,
    )


def _check_ranges(spec: pb.SamplingSpec) -> None:
    if not (math.isfinite(spec.temperature) and spec.temperature >= 0):
        raise ValueError(f"temperature is {spec.temperature}, expected a finite number >= 0")
    for name in ("top_p", "min_p"):
        value = getattr(spec, name)
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}, expected 0 to 1")
    if not (math.isfinite(spec.repetition_penalty) and spec.repetition_penalty >= 0):
        raise ValueError(
            f"repetition_penalty is {spec.repetition_penalty}, expected a finite number >= 0"
        )
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(spec, name)
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}, expected a finite number")


def _ids(
    name: str, ids: Sequence[int], vocab_size: int, *, max_len: int = MAX_LIST_LEN
) -> npt.NDArray[np.int64]:
    if len(ids) > max_len:
        raise ValueError(f"{name} has {len(ids)} entries, expected at most {max_len}")
    token_ids = np.array(ids, np.int64)
    if token_ids.size and token_ids.max() >= vocab_size:
        raise ValueError(f"{name} has token id {token_ids.max()}, expected 0 to {vocab_size - 1}")
    return token_ids


def _stop_ids(spec: pb.SamplingSpec, vocab_size: int) -> npt.NDArray[np.int64]:
    """Those that the model has: a tokenizer may name others, which never come."""
    stop_ids = np.unique(_ids("stop_token_ids", spec.stop_token_ids, 2**32))
    return stop_ids[stop_ids < vocab_size]


def _bad_words(spec: pb.SamplingSpec, vocab_size: int) -> tuple[npt.NDArray[np.int64], ...]:
    if len(spec.bad_words) > MAX_LIST_LEN:
        raise ValueError(
            f"bad_words has {len(spec.bad_words)} entries, expected at most {MAX_LIST_LEN}"
        )
    words = tuple(
        _ids("bad_words", word.ids, vocab_size, max_len=MAX_BAD_WORD_LEN) for word in spec.bad_words
    )
    if not all(word.size for word in words):
        raise ValueError("bad_words has an entry without tokens")
    return words


def _num_logprobs(spec: pb.SamplingSpec, name: str, vocab_size: int) -> int:
    num = int(getattr(spec, name)) if spec.HasField(name) else NOT_ASKED
    if num > vocab_size:
        raise ValueError(f"{name} is {num}, expected at most {vocab_size}")
    return num
