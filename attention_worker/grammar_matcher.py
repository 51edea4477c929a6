"""One request's place in its grammar, and the tokens that may come next.

Owner: the thread of `grammar.py`. V vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from expertmesh.grammar_limits import grammar_limits
from expertmesh_kernels.logits import token_bits

MAX_MESSAGE_LEN = 1000


class GrammarError(Exception):
    """A grammar that cannot be compiled or followed; the message says why."""


class GrammarMatcher:
    """Follows generated tokens through a grammar.

    Where the output may end, the tokens that end it are allowed beside those that go on; once
    nothing can follow, only they are.

    Args:
        tokenizer: Of the model.
        grammar: As llguidance writes grammars.
        stop_ids: Tokens that end the output; those of the tokenizer where there are none.
        vocab_size: Of the model; tokens beyond the tokenizer's vocabulary are never allowed.

    Raises:
        GrammarError: The grammar cannot be compiled.
    """

    def __init__(
        self,
        tokenizer: LLTokenizer,
        grammar: str,
        stop_ids: npt.NDArray[np.int64],
        vocab_size: int,
    ) -> None:
        self._matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=grammar_limits())
        self._check()
        self._num_known = tokenizer.vocab_size
        self._num_words = -(-vocab_size // 32)
        self._eos_ids = frozenset(tokenizer.eos_tokens)
        ends = stop_ids.tolist() or sorted(self._eos_ids)
        self._ends = frozenset(ends)
        in_vocabulary = [token for token in ends if token < vocab_size]
        self._end_bits = token_bits(np.array(in_vocabulary, np.int64), vocab_size)
        eos = np.array([token for token in self._eos_ids if token < vocab_size], np.int64)
        self._eos_bits = token_bits(eos, vocab_size)
        self._num_consumed = 0
        self._num_drafts = 0
        self._draft_ended = False
        self._ended = False

    def advance(self, token_ids: npt.NDArray[np.int32]) -> None:
        """Follows the tokens that are new.

        Args:
            token_ids: All generated tokens, those that were followed already included.

        Raises:
            GrammarError: A token is outside of the grammar.
        """
        new_ids = token_ids[self._num_consumed :].tolist()
        self._num_consumed = len(token_ids)
        if self._ended or not new_ids:
            return
        num_taken = self._matcher.try_consume_tokens(new_ids)
        if num_taken == len(new_ids):
            return
        self._check()
        if not self._may_end():
            raise GrammarError(f"token {new_ids[num_taken]} is outside of the grammar")
        self._ended = True

    def allowed(self) -> npt.NDArray[np.uint32]:
        """Tokens that may come next: a bit mask [ceil(V / 32)].

        Raises:
            GrammarError: The matcher gave up, or nothing may follow.
        """
        if self._ended or self._draft_ended or self._matcher.is_stopped():
            self._check()
            return self._end_bits
        bits_W = np.zeros(self._num_words, np.uint32)
        mask = np.frombuffer(self._matcher.compute_bitmask(), "<u4")[: self._num_words]
        bits_W[: len(mask)] = mask
        self._check()
        if self._may_end():
            bits_W = (bits_W & ~self._eos_bits) | self._end_bits
        if not bits_W.any():
            raise GrammarError("no token of the model can follow")
        return bits_W

    def try_draft(self, token: int) -> bool:
        """Follows a draft until `take_back`; False if it is not allowed.

        As in `advance`, the end of the output need not be its end: it goes on where the request
        ignores such tokens, or has too few.
        """
        if self._ended or self._draft_ended or self._matcher.is_stopped():
            return token in self._ends
        # To llguidance an unknown token is an error, and there is no way back from the end.
        if token < self._num_known and token not in self._eos_ids:
            taken = self._matcher.try_consume_tokens([token]) == 1
            self._num_drafts += taken
            if taken:
                return True
        self._draft_ended = token in self._ends and self._may_end()
        return self._draft_ended

    def take_back(self) -> None:
        """Forgets the drafts."""
        self._draft_ended = False
        if self._num_drafts:
            self._matcher.rollback(self._num_drafts)
            self._num_drafts = 0

    def _may_end(self) -> bool:
        return self._matcher.is_accepting() or self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            message, *_ = self._matcher.get_error().split("\n<state>")
            raise GrammarError(message[:MAX_MESSAGE_LEN])
