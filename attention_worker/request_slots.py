"""Request slots: what is known of each request, in rows that stay put for a request's whole life.

Owner: the thread that runs the steps. The gateway chooses the slot of a request, so a step names
only slots and deltas, and a batch is made by gathering rows, without a Python loop over tokens.
Shape letters: S rows of these tables (request slots), L max_model_len.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from attention_worker.sampling_spec import SlotSampling


class RequestSlots:
    """Tables with one row per request slot.

    Tokens of a row are at [0, length); KV is committed for [0, num_computed), num_computed <=
    length. The tokens from `num_prompt` on are generated: that decides the token class of a row.
    Beyond the length there may be drafts, at [length, length + num_drafts).
    """

    def __init__(self, num_slots: int, max_model_len: int) -> None:
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self.token_ids_SL: npt.NDArray[np.int32] = np.zeros((num_slots, max_model_len), np.int32)
        self.length_S: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.num_computed_S: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.num_prompt_S: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.in_use_S: npt.NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self.ended_S: npt.NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        """A token was due and none came: nothing follows, and the gateway is about to free it."""
        self.num_drafts_S: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.admission_S: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)
        """Counts the requests of a slot: what was derived from an earlier one is void."""
        self.sampling_S: list[SlotSampling] = [SlotSampling()] * num_slots
        self.temperature_S: npt.NDArray[np.float32] = np.zeros(num_slots, np.float32)
        self.min_p_S: npt.NDArray[np.float32] = np.zeros(num_slots, np.float32)
        self.top_p_S: npt.NDArray[np.float32] = np.ones(num_slots, np.float32)
        self.top_k_S: npt.NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self.seed_S: npt.NDArray[np.uint64] = np.zeros(num_slots, np.uint64)
        self.num_logprobs_S: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.num_prompt_logprobs_S: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.routed_experts_S: npt.NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self.edits_S: npt.NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        """Logits are changed before a token is chosen: `sampling_S` says how."""
        self.grammar_S: npt.NDArray[np.bool_] = np.zeros(num_slots, np.bool_)

    def add(
        self,
        slot: int,
        token_ids: npt.NDArray[np.int32],
        num_prompt_tokens: int,
        sampling: SlotSampling,
        num_cached: int = 0,
    ) -> None:
        """Fills a row; keys and values of the first `num_cached` tokens are there, of no others.

        Overwrites what was there.
        """
        length = len(token_ids)
        self.token_ids_SL[slot, :length] = token_ids
        self.length_S[slot] = length
        self.num_computed_S[slot] = num_cached
        self.num_prompt_S[slot] = num_prompt_tokens
        self.num_drafts_S[slot] = 0
        self.ended_S[slot] = False
        self.admission_S[slot] += 1
        self.sampling_S[slot] = sampling
        self.temperature_S[slot] = sampling.temperature
        self.min_p_S[slot] = sampling.min_p
        self.top_p_S[slot] = sampling.top_p
        self.top_k_S[slot] = sampling.top_k
        self.seed_S[slot] = sampling.seed
        self.num_logprobs_S[slot] = sampling.num_logprobs
        self.num_prompt_logprobs_S[slot] = sampling.num_prompt_logprobs
        self.routed_experts_S[slot] = sampling.routed_experts
        self.edits_S[slot] = sampling.edits
        self.grammar_S[slot] = bool(sampling.grammar)
        self.in_use_S[slot] = True

    def holds_unstarted(
        self,
        slot: int,
        token_ids: npt.NDArray[np.int32],
        num_prompt_tokens: int,
        num_cached: int,
    ) -> bool:
        """True if the row holds just this request and no step of it was committed."""
        return bool(
            self.in_use_S[slot]
            and self.num_computed_S[slot] == num_cached
            and self.num_prompt_S[slot] == num_prompt_tokens
            and np.array_equal(self.token_ids_SL[slot, : self.length_S[slot]], token_ids)
        )

    def free(self, slot: int | slice) -> None:
        """Frees a row, or several; a free row stays free."""
        self.in_use_S[slot] = False
        self.length_S[slot] = 0
        self.num_computed_S[slot] = 0
        self.num_drafts_S[slot] = 0
        self.ended_S[slot] = False

    def reset(self) -> None:
        """Frees all rows."""
        self.free(slice(None))

    def commit_computed(
        self, slots_S: npt.NDArray[np.int64], num_tokens_S: npt.NDArray[np.int64]
    ) -> None:
        """KV of this many more tokens is there to stay. Slots must differ from each other."""
        self.num_computed_S[slots_S] += num_tokens_S

    def commit_sampled(
        self,
        slots_N: npt.NDArray[np.int64],
        positions_N: npt.NDArray[np.int64],
        token_ids_N: npt.NDArray[np.int64],
    ) -> None:
        """Appends tokens; those of a row in order, from its length on. Drafts are void then."""
        self.token_ids_SL[slots_N, positions_N] = token_ids_N
        np.add.at(self.length_S, slots_N, 1)
        self.num_drafts_S[slots_N] = 0
