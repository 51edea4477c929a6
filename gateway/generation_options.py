"""The parameters of a generation, typed and bounded: one table for the HTTP and the gRPC API.

null and an absent field mean the default. Ranges are checked here and trusted inside.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from expertmesh.errors import ContextLengthError, RequestError
from gateway.sequence import SamplingParams
from gateway.text.tokenizer import Tokenizer

MAX_STOP_STRINGS = 16
MAX_STOP_LEN = 1024
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 256

StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LEN)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]

_GREEDY_BELOW = 1e-5
"""Temperatures below are greedy: dividing logits by them would overflow."""
_MIN_TOP_P = 1e-6
"""Smaller values select one token as well, and would be 0 in FP32, which stands for 1."""

T = TypeVar("T")
StructT = TypeVar("StructT", bound=msgspec.Struct)


class GenerationOptions(msgspec.Struct, kw_only=True):
    """How tokens are chosen and when the output ends."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    """0 means greedy; default 1."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Only the most likely tokens with this probability together; default 1."""
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """Only so many of the most likely tokens; 0 and -1 mean all; at most the vocabulary."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Only tokens with this share of the largest probability; default 0."""
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    """Logits of tokens in prompt or output are divided by it if positive, else multiplied."""
    presence_penalty: Penalty | None = None
    """Subtracted from the logits of generated tokens."""
    frequency_penalty: Penalty | None = None
    """Subtracted from the logits of generated tokens, times their number."""
    logit_bias: Annotated[dict[str, Any], Meta(max_length=MAX_LOGIT_BIASES)] | None = None
    """Token id to what is added to its logit, -100 to 100."""
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    """Only these tokens may be generated."""
    bad_words: Annotated[list[StopString], Meta(max_length=MAX_BAD_WORDS)] | None = None
    """Words that do not occur in the output, neither first nor after a space."""
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """Same seed, same tokens."""
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Most tokens to generate."""
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """Nothing ends the output before so many tokens; at most `max_tokens`."""
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    """Strings that end the output."""
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    """Tokens that end the output, besides those of the model."""
    include_stop_str_in_output: bool | None = None
    """What ended the output is part of it."""
    ignore_eos: bool | None = None
    """Go on past the model's end tokens."""
    skip_special_tokens: bool | None = None
    """Special tokens are not part of the text; default true."""
    spaces_between_special_tokens: bool | None = None
    """Accepted without effect: vocabularies of this kind are spelled without such spaces."""

    def stop_strings(self) -> tuple[str, ...]:
        """Stop strings without repetitions."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(dict.fromkeys(self.stop))


@dataclass(frozen=True)
class ModelBounds:
    """What the model allows."""

    vocab_size: int
    max_model_len: int
    tokenizer: Tokenizer | None = None

    @property
    def has_tokenizer(self) -> bool:
        """False: prompts and answers are token ids."""
        return self.tokenizer is not None


@dataclass(frozen=True)
class OutputLimit:
    """How many tokens a request may generate.

    Args:
        requested: Asked for by the client; an error if it does not fit.
        default: Without a request, cut to what fits; None for all that fits.
        param: Path of the parameter, for errors.
        prompt_param: Path of the prompt, for errors.
    """

    requested: int | None
    default: int | None
    param: str
    prompt_param: str

    def resolve(self, num_prompt_tokens: int, max_model_len: int) -> int:
        """Most tokens to generate after this prompt.

        Raises:
            ContextLengthError: It does not fit into the context.
        """
        left = max_model_len - num_prompt_tokens
        if left < 1:
            raise ContextLengthError(
                f"the context of this model is {max_model_len} tokens and the prompt has "
                f"{num_prompt_tokens}; at least one must be left for the answer",
                param=self.prompt_param,
            )
        if self.requested is None:
            return left if self.default is None else min(left, self.default)
        if self.requested > left:
            raise ContextLengthError(
                f"the context of this model is {max_model_len} tokens, but the prompt has "
                f"{num_prompt_tokens} and {self.param} asks for {self.requested}, "
                f"together {num_prompt_tokens + self.requested}",
                param=self.param,
            )
        return self.requested


def sampling_params(
    options: GenerationOptions,
    *,
    max_tokens: int,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None = None,
    return_routed_experts: bool = False,
    bad_words: tuple[tuple[int, ...], ...] = (),
    grammar: str = "",
) -> SamplingParams:
    """Parameters for the engine, with every default filled in.

    Args:
        options: Checked options.
        max_tokens: Most tokens to generate after this prompt.
        num_logprobs: As in SamplingParams, as the others.
        num_prompt_logprobs: For the tokens of the prompt.
        return_routed_experts: Return the experts of each token.
        bad_words: Token ids of the options' bad words, see `bad_word_ids`.
        grammar: What the output must match.
    """
    seed = secrets.randbits(64) if options.seed is None else options.seed & (2**64 - 1)
    temperature = _or(options.temperature, 1.0)
    biases = {int(token_id): float(bias) for token_id, bias in (options.logit_bias or {}).items()}
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_p=max(_or(options.top_p, 1.0), _MIN_TOP_P),
        top_k=max(options.top_k or 0, 0),
        seed=seed,
        min_p=options.min_p or 0.0,
        repetition_penalty=_or(options.repetition_penalty, 1.0),
        presence_penalty=options.presence_penalty or 0.0,
        frequency_penalty=options.frequency_penalty or 0.0,
        logit_bias=tuple(sorted(biases.items())),
        allowed_token_ids=tuple(sorted(set(options.allowed_token_ids or ()))),
        bad_words=bad_words,
        min_tokens=options.min_tokens or 0,
        stop=options.stop_strings(),
        stop_token_ids=tuple(sorted(set(options.stop_token_ids or ()))),
        include_stop_str_in_output=bool(options.include_stop_str_in_output),
        ignore_eos=bool(options.ignore_eos),
        skip_special_tokens=_or(options.skip_special_tokens, True),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        return_routed_experts=return_routed_experts,
        grammar=grammar,
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def choice_params(params: SamplingParams, choice: int) -> SamplingParams:
    """Parameters of one of several choices of a prompt: the first has the seed of a single one."""
    if choice == 0:
        return params
    data = params.seed.to_bytes(8, "little") + choice.to_bytes(4, "little")
    digest = hashlib.blake2b(data, digest_size=8, person=b"choice").digest()
    return replace(params, seed=int.from_bytes(digest, "little"))


def check_token_ids(token_ids: Sequence[object], vocab_size: int, param: str) -> tuple[int, ...]:
    """Token ids of a prompt.

    Raises:
        RequestError: Something in the list is not a token id of the model.
    """
    if not token_ids:
        raise RequestError(f"{param} has no token ids", param=param, code="empty_prompt")
    found: list[int] = []
    for index, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param} has {shown(token_id)} at index {index}; expected a token id from 0 to "
                f"{vocab_size - 1}",
                param=param,
                code="invalid_token_id",
            )
        found.append(token_id)
    return tuple(found)


def convert(fields: Mapping[str, object], struct: type[StructT]) -> StructT:
    """Fills a struct; fields that it does not have are ignored.

    Raises:
        RequestError: A value has the wrong type or is out of range; names its path.
    """
    try:
        return msgspec.convert(fields, struct)
    except msgspec.ValidationError as error:
        raise _request_error(str(error), fields) from error


_MISSING = re.compile(r"Object missing required field `(\w+)`(?: - at `\$\.?(.*)`)?")
_LISTS = "stop|stop_token_ids|allowed_token_ids|bad_words"
_ENTRY_OF_LIST = re.compile(rf"^({_LISTS})\.\d+$")  # one parameter, however it is spelled
_WRONG = re.compile(r"(.*) - at `\$\.(.*)`", re.DOTALL)


def _request_error(text: str, fields: Mapping[str, object]) -> RequestError:
    """Turns msgspec's message, `Expected WHAT - at PATH`, into ours."""
    if missing := _MISSING.fullmatch(text):
        parent = _dotted(missing.group(2) or "")
        param = f"{parent}.{missing.group(1)}" if parent else missing.group(1)
        return RequestError(f"{param} is missing", param=param)
    found = _WRONG.fullmatch(text)
    if found is None:
        return RequestError("the request has an invalid value")
    expected, param = found.group(1).partition(", got ")[0], _dotted(found.group(2))
    expected = _in_words_of_json(expected)
    message = f"{param} is {shown(_lookup(fields, param))}; {expected}"
    return RequestError(message, param=_ENTRY_OF_LIST.sub(r"\1", param))


_JSON_WORDS = {"str": "string", "int": "integer", "float": "number", "bool": "true or false"}
_EXPECTED_TYPES = re.compile("(?<=^Expected )`([^`]*)`")


def _in_words_of_json(expected: str) -> str:
    """`Expected `float | null` <= 2.0` to `expected number <= 2.0`: callers speak JSON."""

    def types(found: re.Match[str]) -> str:
        names = [name for name in found.group(1).split(" | ") if name != "null"]
        return " or ".join(_JSON_WORDS.get(name, name) for name in names)

    expected = _EXPECTED_TYPES.sub(types, expected).replace("`", "")
    return expected[0].lower() + expected[1:]


def _dotted(path: str) -> str:
    """`messages[0].content` to `messages.0.content`."""
    return re.sub(r"\[(.*?)\]", r".\1", path)


def _lookup(fields: object, param: str) -> object:
    value = fields
    for key in param.split("."):
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal():
            value = value[int(key)]
        else:
            return None
    return value


def shown(value: object) -> str:
    """A value for an error message: JSON, cut to a length that fits any message."""
    if isinstance(value, str | bytes | list | tuple | dict) and len(value) > 200:
        kind = {str: "a string", bytes: "bytes", dict: "an object"}.get(type(value), "an array")
        return f"{kind} of length {len(value)}"
    try:
        text = json.dumps(value, ensure_ascii=True)
    except (TypeError, ValueError):
        return "an invalid value"
    return text if len(text) <= 60 else f"{text[:57]}..."
