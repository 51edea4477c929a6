"""Parameters of a generation: what the engine gets for what a client sends."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from expertmesh.errors import RequestError
from gateway.generation_options import GenerationOptions, ModelBounds, convert, sampling_params
from gateway.openai.schema import ChatRequest, CompletionRequest
from gateway.option_checks import bad_word_ids
from gateway.sequence import SamplingParams
from gateway.text.tokenizer import Tokenizer
from tests.support.openai_calls import CHAT, HELLO, TEXT, post
from tests.support.scripted_engine import Gateway, byte_tokenizer, scripted_gateway


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    """A server over a scripted engine."""
    async with scripted_gateway() as gateway:
        yield gateway


VALUES: dict[str, tuple[object, object]] = {
    "temperature": (0.5, 0.5),
    "top_p": (0.5, 0.5),
    "top_k": (3, 3),
    "min_p": (0.25, 0.25),
    "repetition_penalty": (1.5, 1.5),
    "presence_penalty": (-2, -2.0),
    "frequency_penalty": (2, 2.0),
    "logit_bias": ({"7": -100, "03": 1.5}, ((3, 1.5), (7, -100.0))),
    "allowed_token_ids": ([9, 7, 9], (7, 9)),
    "seed": (-1, 2**64 - 1),
    "max_tokens": (5, 5),
    "min_tokens": (2, 2),
    "stop": (["x", "y", "x"], ("x", "y")),
    "stop_token_ids": ([9, 7, 9], (7, 9)),
    "include_stop_str_in_output": (True, True),
    "ignore_eos": (True, True),
    "skip_special_tokens": (False, False),
    "prompt_logprobs": (3, 3),
    "return_routed_experts": (True, True),
}
"""Parameter to a value in a request, and what it is for the engine."""
ENGINE_NAMES = {"prompt_logprobs": "num_prompt_logprobs"}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_each_parameter_reaches_the_engine(
    gateway: Gateway, session: aiohttp.ClientSession, path: str, name: str
) -> None:
    """A value arrives; null and absence are the default."""
    prompt: dict[str, object] = HELLO if path == CHAT else {"prompt": "hello"}
    value, expected = VALUES[name]
    for extra in ({name: value}, {name: None}, {}):
        status, _ = await post(session, gateway, path, {**prompt, **extra})
        assert status == 200
    given, null, absent = (
        getattr(request.params, ENGINE_NAMES.get(name, name)) for request in gateway.engine.requests
    )
    assert given == expected
    if name != "seed":  # drawn at random
        assert null == absent != given


async def test_place_in_the_queue(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    """Priority, salt and time limit reach the engine; the server's own limit is the longest."""
    body = {**HELLO, "priority": -3, "cache_salt": "mine", "timeout_s": 2.5}
    await post(session, gateway, CHAT, body)
    await post(session, gateway, CHAT, {**HELLO, "timeout_s": 864_000})
    await post(session, gateway, CHAT, HELLO)
    mine, patient, plain = gateway.engine.requests
    assert (mine.priority, mine.cache_salt) == (-3, "mine")
    assert (plain.priority, plain.cache_salt) == (0, "")
    assert mine.deadline_s == pytest.approx(mine.arrival_s + 2.5)
    for request in (patient, plain):
        assert request.deadline_s == pytest.approx(request.arrival_s + 3600)


def test_every_field_of_the_engine_has_a_source() -> None:
    """No parameter of the engine is forgotten at the door."""
    covered = {ENGINE_NAMES.get(name, name) for name in VALUES}
    covered |= {"num_logprobs", "bad_words", "grammar"}  # tested elsewhere
    assert covered == set(SamplingParams.__dataclass_fields__)


def test_defaults_are_the_engine_s() -> None:
    """A request without options has the defaults of the engine, and a random seed."""
    drawn = sampling_params(GenerationOptions(seed=0), max_tokens=3, num_logprobs=None)
    assert drawn == SamplingParams(max_tokens=3)
    seeds = {
        sampling_params(GenerationOptions(), max_tokens=3, num_logprobs=None).seed for _ in range(9)
    }
    assert len(seeds) == 9


def test_bad_words_are_found_at_the_start_and_after_a_space() -> None:
    """A sequence with a space before it is needed only if the bare one does not end it."""
    options = GenerationOptions(bad_words=["cat", " cat", "dog"])
    byte_level = byte_tokenizer()
    found = bad_word_ids(options, ModelBounds(320, 512, byte_level))
    assert found == (tuple(byte_level.encode("cat")), tuple(byte_level.encode("dog")))
    vocab = {"c": 0, "a": 1, "t": 2, "ca": 3, "cat": 4, "\u0120": 5, "\u0120cat": 6}
    merges = [("c", "a"), ("ca", "t"), ("\u0120", "cat")]
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    bounds = ModelBounds(7, 512, Tokenizer(raw.to_str()))
    assert bad_word_ids(GenerationOptions(bad_words=["cat"]), bounds) == ((4,), (6,))
    assert bad_word_ids(GenerationOptions(), bounds) == ()


WRONG: tuple[object, ...] = ("", "x" * 2000, [], [[]], {}, {"role": 1}, -1e9, 1e9, 1.5, True)
PYTHON_WORDS = re.compile(r"\b(int|str|float|bool|list|dict|null)\b")


def refusal(fields: dict[str, object], struct: type[msgspec.Struct]) -> RequestError | None:
    """The error of a call, if it is one."""
    required = {"messages": [{"role": "user", "content": "a"}], "prompt": "a"}
    try:
        convert({**required, **fields}, struct)
    except RequestError as error:
        return error
    return None


@pytest.mark.parametrize("struct", [ChatRequest, CompletionRequest], ids=lambda s: s.__name__)
def test_errors_speak_json(struct: type[msgspec.Struct]) -> None:
    """What was expected is said in the words of JSON, for every parameter and kind of fault."""
    num_refused = 0
    for name in struct.__struct_fields__:
        for error in filter(None, (refusal({name: value}, struct) for value in WRONG)):
            found, _, expected = error.message.partition("; ")
            assert found.startswith(name)
            assert not PYTHON_WORDS.search(expected), error.message
            assert str(error.param).startswith(name)
            num_refused += 1
    assert num_refused > 3 * len(struct.__struct_fields__)


def test_a_value_that_looks_like_a_type_is_left_as_it_is() -> None:
    """Only the name of the type is put into other words."""
    with pytest.raises(RequestError, match="invalid enum value 'int'"):
        convert({"prompt": "a", "truncation_side": "int"}, CompletionRequest)
