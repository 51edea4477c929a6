"""docs/http_api.md against the server: parameters, endpoints, and that none is silently ignored."""

from __future__ import annotations

import pytest

from gateway.openai.schema import NEUTRAL, NEUTRAL_IN_CHAT
from tests.support.parameter_tables import DOCUMENT, STRUCTS, docstrings, with_tables
from tests.support.scripted_engine import scripted_gateway

READ_ELSEWHERE = {
    "response_format",
    "structured_outputs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
}
"""Known parameters that other modules read from the body."""
HARMLESS = {"user", "session_id", "metadata", "store", "service_tier"}
"""Say nothing about the answer."""
COMPLETION = """
    model prompt echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop
    stream stream_options suffix temperature top_p user best_of top_k min_p repetition_penalty
    min_tokens ignore_eos stop_token_ids include_stop_str_in_output skip_special_tokens
    spaces_between_special_tokens allowed_token_ids bad_words prompt_logprobs logprob_token_ids
    truncate_prompt_tokens truncation_side add_special_tokens response_format structured_outputs
    priority request_id session_id return_token_ids return_tokens_as_token_ids cache_salt
    return_routed_experts routed_experts_prompt_start stream_interval vllm_xargs use_beam_search
"""
"""What vLLM's clients may send to /v1/completions."""
CHAT = """
    messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens
    max_completion_tokens n presence_penalty response_format seed stop stream stream_options
    temperature top_p tools tool_choice parallel_tool_calls user top_k min_p repetition_penalty
    min_tokens ignore_eos stop_token_ids include_stop_str_in_output skip_special_tokens
    spaces_between_special_tokens allowed_token_ids bad_words prompt_logprobs
    truncate_prompt_tokens echo add_generation_prompt continue_final_message add_special_tokens
    documents chat_template chat_template_kwargs structured_outputs priority request_id cache_salt
    return_token_ids return_tokens_as_token_ids functions function_call audio modalities
    prediction metadata store service_tier web_search_options
"""
"""What they may send to /v1/chat/completions."""


def test_tables_are_those_of_the_schema() -> None:
    """Fix: python -m tests.support.parameter_tables"""
    text = DOCUMENT.read_text()
    assert with_tables(text) == text


@pytest.mark.parametrize(
    ("struct", "names", "refused"),
    [("completion", COMPLETION, NEUTRAL), ("chat", CHAT, NEUTRAL | NEUTRAL_IN_CHAT)],
)
def test_no_known_parameter_is_ignored(struct: str, names: str, refused: dict[str, object]) -> None:
    """Each has a meaning here, or is refused by name, or says nothing about the answer."""
    taken = set(docstrings(STRUCTS[struct]))
    assert set(names.split()) <= taken | set(refused) | READ_ELSEWHERE | HARMLESS
    assert not taken & set(refused), "one table would hide the other"


async def test_endpoints_are_those_of_the_server() -> None:
    """Every path is in the document."""
    text = DOCUMENT.read_text()
    paths: set[str] = set()
    async with scripted_gateway(
        add_routes=lambda app: paths.update(r.canonical for r in app.router.resources())
    ):
        pass
    paths.discard("/v1/models/{model}")  # spelled with {id} there
    assert len(paths) > 10
    assert [path for path in paths if f"{path}`" not in text and f"{path}," not in text] == []
