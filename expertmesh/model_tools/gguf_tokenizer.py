"""`tokenizer.json` and its companions from the metadata of a GGUF file (byte-level BPE)."""

from __future__ import annotations

from typing import cast

from expertmesh.errors import CheckpointError
from expertmesh.model_tools.config_json import encode
from expertmesh.model_tools.gguf_source import GgufSource

_CONTROL_TOKEN, _USER_TOKEN = 3, 4
"""Token types of GGUF: special, and added without being special."""

_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Our name of a special token to its name in GGUF."""


def tokenizer_files(source: GgufSource) -> dict[str, bytes]:
    """File name to content.

    Raises:
        CheckpointError: the tokenizer is not the byte-level BPE that SmolLM models have.
    """
    kind = (source.field("tokenizer.ggml.model"), source.field("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise CheckpointError(f"tokenizer: expected ('gpt2', 'smollm'), found {kind}")
    return {
        "tokenizer.json": _tokenizer_json(source).encode(),
        "tokenizer_config.json": encode(_tokenizer_config(source)),
    }


def _tokenizer_json(source: GgufSource) -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _tokens(source)
    types = cast(list[int], source.field("tokenizer.ggml.token_type"))
    merges = cast(list[str], source.field("tokenizer.ggml.merges"))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [cast(tuple[str, str], tuple(merge.split(" ", 1))) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind == _CONTROL_TOKEN:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_TOKEN:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    return str(tokenizer.to_str(pretty=False))


def _tokenizer_config(source: GgufSource) -> dict[str, object]:
    tokens = _tokens(source)
    special = {
        f"{name}_token": tokens[source.integer(f"tokenizer.ggml.{key}_token_id")]
        for name, key in _SPECIAL.items()
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": source.config.max_position_embeddings,
        **special,
        "chat_template": source.field("tokenizer.chat_template"),
    }


def _tokens(source: GgufSource) -> list[str]:
    return cast(list[str], source.field("tokenizer.ggml.tokens"))
