"""The parameters of a generation, typed and bounded: one table for the HTTP and the gRPC API.

null and an absent field mean the default. Ranges are checked here and trusted inside.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from expertmesh.errors import ContextLengthError, RequestError
from gateway.sequence import SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_LEN = 1024
MAX_LOGPROBS = 20

StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LEN)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]

_GREEDY_BELOW = 1e-5
"""Temperatures below are greedy: dividing logits by them would overflow."""
_MIN_TOP_P = 1e-6
"""Smaller values select one token as well, and would be 0 in FP32, which stands for 1."""

StructT = TypeVar("StructT", bound=msgspec.Struct)


class GenerationOptions(msgspec.Struct, kw_only=True):
    """How tokens are chosen and when the output ends."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    """0 means greedy; default 1."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """0 and -1 mean all tokens; at most the size of the vocabulary."""
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    ignore_eos: bool | None = None

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
    has_tokenizer: bool


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


def check_options(options: GenerationOptions, bounds: ModelBounds, prefix: str = "") -> None:
    """Checks what depends on the model.

    Args:
        options: The options.
        bounds: What the model allows.
        prefix: Put before names of parameters, e.g. "sampling.".

    Raises:
        RequestError: A value is out of the model's range.
    """
    if options.top_k is not None and options.top_k > bounds.vocab_size:
        raise RequestError(
            f"top_k is {options.top_k}; expected at most {bounds.vocab_size}, the vocabulary",
            param=f"{prefix}top_k",
        )
    if options.stop and not bounds.has_tokenizer:
        raise RequestError(
            "this model has no tokenizer, so stop strings cannot be found", param=f"{prefix}stop"
        )


def sampling_params(
    options: GenerationOptions, *, max_tokens: int, num_logprobs: int | None
) -> SamplingParams:
    """Parameters for the engine, with every default filled in."""
    seed = secrets.randbits(64) if options.seed is None else options.seed & (2**64 - 1)
    temperature = 1.0 if options.temperature is None else options.temperature
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_p=1.0 if options.top_p is None else max(options.top_p, _MIN_TOP_P),
        top_k=max(options.top_k or 0, 0),
        seed=seed,
        stop=options.stop_strings(),
        ignore_eos=bool(options.ignore_eos),
        num_logprobs=num_logprobs,
    )


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
_ENTRY_OF_STOP = re.compile(r"^(stop)\.\d+$")  # one parameter, however it is spelled
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
    expected = expected.replace("`", "").replace(" | null", "")
    expected = expected[0].lower() + expected[1:]
    message = f"{param} is {shown(_lookup(fields, param))}; {expected}"
    return RequestError(message, param=_ENTRY_OF_STOP.sub(r"\1", param))


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
