"""Checks of generation options that depend on the model, and words as its tokens.

Every error names the parameter: these checks are the door, and everything behind trusts them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from expertmesh.errors import RequestError
from expertmesh.model_config import ModelConfig
from gateway.generation_options import GenerationOptions, ModelBounds, shown
from gateway.text.tokenizer import Tokenizer

_MAX_BIAS = 100.0
_NEEDS_TOKENIZER = ("stop", "bad_words")


def check_options(options: GenerationOptions, bounds: ModelBounds) -> None:
    """Checks what depends on the model.

    Args:
        options: The options.
        bounds: What the model allows.

    Raises:
        RequestError: A value is out of the model's range.
    """
    if options.top_k is not None and options.top_k > bounds.vocab_size:
        raise RequestError(
            f"top_k is {options.top_k}; expected at most {bounds.vocab_size}, the vocabulary",
            param="top_k",
        )
    for name in _NEEDS_TOKENIZER:
        if getattr(options, name) and not bounds.has_tokenizer:
            raise RequestError(
                f"this model has no tokenizer, so {name} cannot be found in its output",
                param=name,
            )
    _check_ids(options.stop_token_ids or (), bounds.vocab_size, "stop_token_ids")
    _check_ids(options.allowed_token_ids or (), bounds.vocab_size, "allowed_token_ids")
    _check_biases(options, bounds.vocab_size)


def _check_ids(ids: Sequence[int], vocab_size: int, name: str) -> None:
    worst = max(ids, default=0)
    if worst >= vocab_size:
        raise RequestError(
            f"{name} has {worst}; expected token ids from 0 to {vocab_size - 1}",
            param=name,
            code="invalid_token_id",
        )


def _check_biases(options: GenerationOptions, vocab_size: int) -> None:
    param = "logit_bias"
    seen: set[int] = set()
    for key, bias in (options.logit_bias or {}).items():
        if not (key.isascii() and key.isdecimal() and len(key) < 12 and int(key) < vocab_size):
            raise RequestError(
                f"logit_bias has the key {shown(key)}; expected token ids from 0 to "
                f"{vocab_size - 1}",
                param=param,
                code="invalid_token_id",
            )
        if not _is_number(bias) or not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise RequestError(
                f"logit_bias has {shown(bias)} for token {key}; expected a number from -100 to 100",
                param=param,
            )
        if int(key) in seen:
            raise RequestError(f"logit_bias names token {int(key)} twice", param=param)
        seen.add(int(key))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_min_tokens(options: GenerationOptions, max_tokens: int) -> None:
    """Checks how many tokens must be generated against how many may be.

    Raises:
        RequestError: Too many, or no token is left to begin with.
    """
    least = options.min_tokens or 0
    if least > max_tokens:
        raise RequestError(
            f"min_tokens is {least}; expected at most {max_tokens}, the tokens that may be "
            "generated",
            param="min_tokens",
        )
    allowed = set(options.allowed_token_ids or ())
    if least and allowed and allowed <= set(options.stop_token_ids or ()):
        raise RequestError(
            "allowed_token_ids has only tokens of stop_token_ids, so that none is left before "
            f"min_tokens, {least}",
            param="allowed_token_ids",
        )


def bad_word_ids(options: GenerationOptions, bounds: ModelBounds) -> tuple[tuple[int, ...], ...]:
    """Token sequences that the output must not have: each word at the start, and after a space.

    Raises:
        RequestError: A word has no tokens, or tokens that the model lacks.
    """
    if not options.bad_words:
        return ()
    assert bounds.tokenizer is not None, "check_options refuses bad words without a tokenizer"
    found: dict[tuple[int, ...], None] = {}
    for word in options.bad_words:
        sequences = list(_spellings(word, bounds.tokenizer))
        if not sequences:
            param = "bad_words"
            raise RequestError(f"bad_words has {shown(word)}, which has no tokens", param=param)
        for ids in sequences:
            _check_ids(ids, bounds.vocab_size, "bad_words")
            found[ids] = None
    return tuple(found)


def _spellings(word: str, tokenizer: Tokenizer) -> Iterable[tuple[int, ...]]:
    """The word without and with a space before it; the latter unless the former covers it."""
    bare = word.lstrip()
    plain = tuple(tokenizer.encode(bare, False))
    spaced = tuple(tokenizer.encode(f" {bare}", False)) if bare else ()
    if plain:
        yield plain
    if spaced and (not plain or spaced[-len(plain) :] != plain):
        yield spaced


def check_routed_experts(wanted: bool, config: ModelConfig) -> None:
    """Refuses to return what the model does not have.

    Raises:
        RequestError: No layer has routed experts.
    """
    if wanted and not config.moe_layers:
        raise RequestError(
            "this model has no routed experts",
            param="return_routed_experts",
            code="unsupported_by_model",
        )


def check_prompt_start(start: int, num_prompt_tokens: int) -> None:
    """Refuses to leave out more experts than those of the prompt.

    Raises:
        RequestError: `routed_experts_prompt_start` is behind the prompt.
    """
    if start > num_prompt_tokens:
        param = "routed_experts_prompt_start"
        raise RequestError(f"{param} is {start}; the prompt has {num_prompt_tokens}", param=param)
