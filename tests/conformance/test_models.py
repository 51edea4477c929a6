"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from tests.support import api_schema
from tests.support.strict_client import CONTEXT_LEN, StrictClient, error_of


def test_list(client: StrictClient) -> None:
    """The list follows the schema and has what tools read beyond it."""
    answer = client.api.get("/v1/models")
    assert answer.status == 200
    api_schema.check("openai_chat", "ListModelsResponse", answer.json)
    (card,) = answer.json["data"]
    assert {"id", "object", "created", "owned_by", "root", "parent", "max_model_len"} <= set(card)
    assert card["max_model_len"] == CONTEXT_LEN
    assert card["permission"] == []
    assert (card["moe"]["num_experts"], card["moe"]["top_k"]) == (8, 2)


def test_retrieve(client: StrictClient) -> None:
    """One model is the entry of the list."""
    (card,) = client.api.get("/v1/models").json["data"]
    answer = client.api.get(f"/v1/models/{card['id']}")
    assert answer.status == 200
    api_schema.check("openai_chat", "Model", answer.json)
    assert answer.json == card


def test_unknown_model(client: StrictClient) -> None:
    """Another name is 404, also one with a slash in it."""
    for name in ("nothing", "some/thing"):
        error = error_of(client.api.get(f"/v1/models/{name}"), 404)
        assert error["code"] == "model_not_found"
        assert error["param"] == "model"
        assert name in error["message"]


def test_model_may_be_left_out(client: StrictClient) -> None:
    """Absent, null and empty all mean the one that is served; its name does too."""
    (card,) = client.api.get("/v1/models").json["data"]
    texts = {
        client.chat(**fields)["choices"][0]["message"]["content"]
        for fields in ({}, {"model": None}, {"model": ""}, {"model": card["id"]})
    }
    assert len(texts) == 1
