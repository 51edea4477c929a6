"""An expert worker whose checkpoint has one other weight: found at its start, and never asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.harness.pool import PoolWorker, running
from tests.conftest import Models
from tests.support.changed_weights import with_changed_weight
from tests.support.mesh import gateway
from tests.support.oracle import prompts
from tests.support.processes import poll
from tests.support.tiny_checkpoints import MIXTRAL

pytestmark = pytest.mark.alone

LAYER, EXPERT = 1, 3
TENSOR = f"model.layers.{LAYER}.block_sparse_moe.experts.{EXPERT}.w2.weight"
NUM_TOKENS = 60


def test_one_changed_weight(models: Models, tmp_path: Path) -> None:
    """Tokens are those of the right checkpoint, and the rest of the expert worker is used.

    They would be others: the model with that weight has other ones.
    """
    model = models.tiny(MIXTRAL)
    changed = with_changed_weight(model, tmp_path / "changed", TENSOR, value=100.0)
    asked = prompts(MIXTRAL.vocab_size, [5, 30], seed=4)
    expected = [models.oracle(model).greedy(prompt, NUM_TOKENS).token_ids for prompt in asked]
    wrong = [models.oracle(changed).greedy(prompt, NUM_TOKENS).token_ids for prompt in asked]
    assert expected != wrong
    flags = ("--dtype", "float32")
    members = [PoolWorker(folder, "all", flags) for folder in (model, changed)]
    with (
        running(members) as (right, other),
        gateway(model, [right.address, other.address]) as server,
    ):
        found = "moe_wrong_expert_copies_total"
        poll(lambda: server.api.metrics()[found] == 1, timeout_s=30.0, what="it is found")
        assert [server.api.complete(p, NUM_TOKENS).token_ids for p in asked] == expected
        by_address = {each["address"]: each for each in server.api.ready().json["workers"]}
        assert by_address[right.address]["message"] == ""
        said = f"layer {LAYER} expert {EXPERT} with other bytes than this gateway's checkpoint"
        assert said in by_address[other.address]["message"]
        assert other.state().load.calls > 0
        assert f"has layer {LAYER} expert {EXPERT} with other bytes" in server.process.stderr
