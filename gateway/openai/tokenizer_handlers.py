"""/tokenize, /detokenize and /tokenizer_info: what clients need that have no tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from expertmesh.errors import RequestError
from gateway.generation_options import check_token_ids, convert
from gateway.openai.body import read_json
from gateway.openai.handlers import json_response
from gateway.openai.logprobs import Json
from gateway.openai.prompts import encode_messages
from gateway.openai.schema import ChatMessage, check_named_model, template_options
from gateway.service import GenerationFrontend
from gateway.text.tokenizer import Tokenizer
from gateway.tools.definitions import parse_tool_use


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool | None = None
    """Of a text; default true."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """The last three are of a conversation, as in /v1/chat/completions; `tools` too."""
    return_token_strs: bool | None = None
    """The tokens as the vocabulary spells them, too."""


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[int]


class TokenizerHandlers:
    """Handlers over one frontend."""

    def __init__(self, frontend: GenerationFrontend) -> None:
        self._frontend = frontend
        self._model = frontend.model

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Puts the endpoints."""
        router.add_post("/tokenize", self.tokenize)
        router.add_post("/detokenize", self.detokenize)
        router.add_get("/tokenizer_info", self.tokenizer_info)

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /tokenize."""
        fields = await read_json(request, self._frontend)
        body = convert(fields, TokenizeRequest)
        check_named_model(body.model, self._model)
        ids = await self._token_ids(body, fields)
        answer: Json = {
            "count": len(ids),
            "max_model_len": self._model.max_model_len,
            "tokens": ids,
            "token_strs": None,
        }
        if body.return_token_strs:
            tokenizer = self._tokenizer("return_token_strs")
            answer["token_strs"] = [tokenizer.spelling(token_id) for token_id in ids]
        return json_response(answer)

    async def _token_ids(self, body: TokenizeRequest, fields: Mapping[str, object]) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("expected one of prompt and messages", param="prompt")
        if body.messages is not None:
            options = template_options(
                body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs
            )
            tools = parse_tool_use(fields).offered
            return await encode_messages(
                self._frontend, body.messages, tools=tools, options=options
            )
        special = body.add_special_tokens is not False
        encode = self._tokenizer("prompt").encode
        return await self._frontend.run_in_thread(encode, body.prompt or "", special)

    async def detokenize(self, request: web.Request) -> web.Response:
        """POST /detokenize; special tokens are spelled."""
        body = convert(await read_json(request, self._frontend), DetokenizeRequest)
        check_named_model(body.model, self._model)
        decode = self._tokenizer("tokens").decode
        size = self._model.config.vocab_size
        ids = check_token_ids(body.tokens, size, "tokens") if body.tokens else ()
        text = await self._frontend.run_in_thread(decode, ids, False)
        return json_response({"prompt": text})

    async def tokenizer_info(self, request: web.Request) -> web.Response:
        """GET /tokenizer_info: tokenizer_config.json, with the chat template."""
        tokenizer, template = self._tokenizer(None), self._model.chat_template
        info = {key: _plain(value) for key, value in tokenizer.config.items()}
        info["chat_template"] = None if template is None else template.source
        info.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        return json_response(info)

    def _tokenizer(self, param: str | None) -> Tokenizer:
        tokenizer = self._model.tokenizer
        if tokenizer is None:
            raise RequestError(
                "this model has no tokenizer", param=param, code="unsupported_by_model"
            )
        return tokenizer


def _plain(value: object) -> object:
    """Special tokens as their text: the file may describe them as objects."""
    if isinstance(value, Mapping) and isinstance(value.get("content"), str):
        return value["content"]
    return value
