"""What a step says is checked before it is used, and may be said twice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from attention_worker.batch import Schedule
from attention_worker.kv_cache import PagedKvCache
from attention_worker.model_states.paged_kv import PagedKvState
from attention_worker.request_slots import RequestSlots
from attention_worker.step_deltas import MalformedStepError, StepDeltas
from expertmesh.model_config import (
    DenseFfnConfig,
    GqaConfig,
    LayerConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
)
from expertmesh.v1 import attention_service_pb2 as pb


class Tables:
    """Four slots, sixteen blocks of four tokens, sequences of at most 20 tokens.

    Args:
        windows: Sliding window of each layer.
    """

    def __init__(self, *windows: int | None) -> None:
        layers = tuple(
            LayerConfig(
                GqaConfig(1, 1, 2, RopeConfig(1e4, 2), scale=1.0, sliding_window=window),
                DenseFfnConfig(2),
            )
            for window in windows
        )
        config = ModelConfig("llama", 10, 2, layers, NormConfig(1e-5), 20, False, "float32")
        kv = PagedKvCache(config, 16, 4, torch.float32, torch.device("cpu"))
        self.slots = RequestSlots(4, 20)
        self.state = PagedKvState(kv, 4, 20)
        self.deltas = StepDeltas(self.slots, self.state, vocab_size=10, max_step_tokens=12)


def _new(slot: int, num_tokens: int, **fields: object) -> pb.NewRequest:
    values: dict[str, object] = {
        "token_ids": np.arange(num_tokens, dtype="<i4").tobytes() if num_tokens < 10 else b"",
        "num_prompt_tokens": num_tokens,
    }
    if num_tokens >= 10:
        values["token_ids"] = np.ones(num_tokens, "<i4").tobytes()
    return pb.NewRequest(slot=slot, **(values | fields))  # type: ignore[arg-type]


def _work(slot: int, start: int, num: int, **fields: object) -> pb.ScheduledRequest:
    return pb.ScheduledRequest(slot=slot, start=start, num_tokens=num, **fields)  # type: ignore[arg-type]


def _blocks(*block_ids: int, group: int = 0, start: int = 0) -> pb.BlockAppend:
    return pb.BlockAppend(group=group, start=start, block_ids=block_ids)


@pytest.fixture
def tables() -> Tables:
    """Slot 1 holds a request of 6 tokens with two blocks."""
    tables = Tables(None)
    step = pb.StepRequest(
        new_requests=[_new(1, 6)],
        scheduled=[_work(1, 0, 6, new_blocks=[_blocks(3, 9)], sample=True)],
    )
    tables.deltas.apply(step)
    return tables


def test_schedule_carries_the_work(tables: Tables) -> None:
    """Arrays have one entry per scheduled request, in order."""
    step = pb.StepRequest(
        new_requests=[_new(2, 5)],
        scheduled=[_work(2, 0, 3, new_blocks=[_blocks(0)]), _work(1, 0, 6, sample=True)],
    )
    schedule = tables.deltas.apply(step)
    assert schedule.slots_S.tolist() == [2, 1]
    assert schedule.starts_S.tolist() == [0, 0]
    assert schedule.num_tokens_S.tolist() == [3, 6]
    assert schedule.sample_S.tolist() == [False, True]
    assert tables.state.block_table(1).tolist() == [3, 9]


def test_repeated_new_request_starts_the_slot_afresh(tables: Tables) -> None:
    """The same request, not started yet, may be sent again with other blocks."""
    step = pb.StepRequest(
        new_requests=[_new(1, 6)], scheduled=[_work(1, 0, 6, new_blocks=[_blocks(7, 8)])]
    )
    tables.deltas.apply(step)
    assert tables.state.block_table(1).tolist() == [7, 8]


def test_freed_slot_can_be_taken_in_the_same_step(tables: Tables) -> None:
    """Freed slots go first; a slot that is free already stays free."""
    step = pb.StepRequest(
        freed_slots=[1, 3],
        new_requests=[_new(1, 2)],
        scheduled=[_work(1, 0, 2, new_blocks=[_blocks(0)])],
    )
    tables.deltas.apply(step)
    assert tables.slots.length_S[1] == 2
    assert tables.state.block_table(1).tolist() == [0]


def test_recomputed_request_has_a_prompt_and_more(tables: Tables) -> None:
    """Tokens generated before a preemption come with the request."""
    step = pb.StepRequest(
        new_requests=[_new(0, 7, num_prompt_tokens=3)],
        scheduled=[_work(0, 0, 7, new_blocks=[_blocks(0, 1)])],
    )
    tables.deltas.apply(step)
    assert tables.slots.num_prompt_S[0] == 3


MALFORMED: list[tuple[str, Callable[[], pb.StepRequest], str]] = [
    ("freed slot", lambda: pb.StepRequest(freed_slots=[4]), "slot 4 is out of range: there are 4"),
    ("new slot", lambda: pb.StepRequest(new_requests=[_new(9, 2)]), "slot 9 is out of range"),
    ("in use", lambda: pb.StepRequest(new_requests=[_new(1, 5)]), "slot 1 is in use"),
    ("no tokens", lambda: pb.StepRequest(new_requests=[_new(0, 0)]), "slot 0: 0 tokens"),
    ("long", lambda: pb.StepRequest(new_requests=[_new(0, 21)]), "21 tokens.*max_model_len=20"),
    (
        "ragged",
        lambda: pb.StepRequest(new_requests=[_new(0, 1, token_ids=b"12345")]),
        "slot 0: token_ids has 5 bytes",
    ),
    (
        "token id",
        lambda: pb.StepRequest(
            new_requests=[_new(0, 1, token_ids=np.array([10], "<i4").tobytes())]
        ),
        "slot 0: token id 10, expected 0 to 9",
    ),
    (
        "prompt",
        lambda: pb.StepRequest(new_requests=[_new(0, 2, num_prompt_tokens=3)]),
        "slot 0: num_prompt_tokens is 3, expected 1 to 2",
    ),
    (
        "temperature",
        lambda: pb.StepRequest(
            new_requests=[_new(0, 2, sampling=pb.SamplingSpec(temperature=float("nan")))]
        ),
        "slot 0: temperature is nan",
    ),
    (
        "top_p",
        lambda: pb.StepRequest(new_requests=[_new(0, 2, sampling=pb.SamplingSpec(top_p=1.5))]),
        "slot 0: top_p is 1.5",
    ),
    (
        "logprobs",
        lambda: pb.StepRequest(
            new_requests=[_new(0, 2, sampling=pb.SamplingSpec(num_logprobs=11))]
        ),
        "slot 0: num_logprobs is 11, expected at most 10",
    ),
    ("range", lambda: pb.StepRequest(scheduled=[_work(4, 0, 1)]), "slot 4: is out of range"),
    ("unknown", lambda: pb.StepRequest(scheduled=[_work(2, 0, 1)]), "slot 2: holds no request"),
    (
        "twice",
        lambda: pb.StepRequest(scheduled=[_work(1, 0, 1), _work(1, 0, 1)]),
        "slot 1: is scheduled twice",
    ),
    ("empty", lambda: pb.StepRequest(scheduled=[_work(1, 0, 0)]), "slot 1: has num_tokens 0"),
    ("start", lambda: pb.StepRequest(scheduled=[_work(1, 2, 1)]), "slot 1: start is 2, expected 0"),
    (
        "end",
        lambda: pb.StepRequest(scheduled=[_work(1, 0, 7)]),
        "slot 1: tokens end at 7, but only 6 are known",
    ),
    (
        "sample",
        lambda: pb.StepRequest(scheduled=[_work(1, 0, 4, sample=True)]),
        "slot 1: samples after token 4, but 6 tokens are known",
    ),
    (
        "block id",
        lambda: pb.StepRequest(scheduled=[_work(1, 0, 6, new_blocks=[_blocks(16)])]),
        "slot 1: KV block 16 is out of range: the pool has 16",
    ),
    (
        "group",
        lambda: pb.StepRequest(scheduled=[_work(1, 0, 6, new_blocks=[_blocks(5, group=1)])]),
        "slot 1: KV group 1 is out of range: there are 1",
    ),
    (
        "replaced block",
        lambda: pb.StepRequest(scheduled=[_work(1, 0, 6, new_blocks=[_blocks(5, start=1)])]),
        "slot 1: KV blocks start at 1, but the table has 2 and may lack 0",
    ),
    (
        "gap",
        lambda: pb.StepRequest(scheduled=[_work(1, 0, 6, new_blocks=[_blocks(5, start=3)])]),
        "slot 1: KV blocks start at 3, but the table has 2 and may lack 0",
    ),
    (
        "gap in front",
        lambda: pb.StepRequest(
            new_requests=[_new(0, 9, num_cached=8)],
            scheduled=[_work(0, 8, 1, new_blocks=[_blocks(5, start=2)])],
        ),
        "slot 0: KV blocks start at 2, but the table has 0 and may lack 0",
    ),
    (
        "repeated block",
        lambda: pb.StepRequest(scheduled=[_work(1, 0, 6, new_blocks=[_blocks(9, start=2)])]),
        r"slot 1: KV blocks \[9\] repeat a block",
    ),
    (
        "few blocks",
        lambda: pb.StepRequest(
            new_requests=[_new(0, 5)], scheduled=[_work(0, 0, 5, new_blocks=[_blocks(0)])]
        ),
        "slot 0: tokens end at 5, but its KV blocks hold 4",
    ),
    (
        "too much",
        lambda: pb.StepRequest(
            new_requests=[_new(0, 9)], scheduled=[_work(0, 0, 9), _work(1, 0, 6)]
        ),
        "15 tokens in a step, expected at most 12",
    ),
    (
        "full",
        lambda: pb.StepRequest(
            new_requests=[_new(0, 20)], scheduled=[_work(0, 0, 20, sample=True)]
        ),
        "slot 0: samples a token beyond max_model_len=20",
    ),
]


@pytest.mark.parametrize(
    ("make_step", "message"),
    [case[1:] for case in MALFORMED],
    ids=[case[0] for case in MALFORMED],
)
def test_malformed_steps_name_slot_and_value(
    tables: Tables, make_step: Callable[[], pb.StepRequest], message: str
) -> None:
    """Each is refused with its own message, and a good step goes through afterwards."""
    with pytest.raises(MalformedStepError, match=message):
        tables.deltas.apply(make_step())
    schedule = tables.deltas.apply(pb.StepRequest(scheduled=[_work(1, 0, 6, sample=True)]))
    assert schedule.num_tokens_S.tolist() == [6]


WINDOW = 6


def _windowed() -> Tables:
    """Two KV groups: one sees all, one sees six tokens. Slot 1 holds ten tokens, computed."""
    tables = Tables(None, WINDOW)
    appends = [_blocks(0, 1, 2), _blocks(3, 4, 5, group=1)]
    step = pb.StepRequest(
        new_requests=[_new(1, 10)], scheduled=[_work(1, 0, 10, new_blocks=appends, sample=True)]
    )
    _commit(tables, tables.deltas.apply(step))
    return tables


def _commit(tables: Tables, schedule: Schedule) -> None:
    """As after a step; each slot gets a token."""
    tables.slots.commit_computed(schedule.slots_S, schedule.num_tokens_S)
    tables.state.commit(schedule.slots_S, schedule.num_tokens_S)
    slots_S = schedule.slots_S
    tables.slots.commit_sampled(slots_S, tables.slots.length_S[slots_S], slots_S)


def test_each_group_has_its_table() -> None:
    """A layer finds the blocks of its own group, and rows their places in them."""
    tables = _windowed()
    inputs = tables.state.prepare(np.array([1]), np.array([0], np.int32), np.array([9], np.int32))
    assert [inputs.of_layer(i).block_tables_SB.tolist() for i in (0, 1)] == [
        [[0, 1, 2]],
        [[3, 4, 5]],
    ]
    assert [inputs.of_layer(i).kv_slots_T.tolist() for i in (0, 1)] == [[2 * 4 + 1], [5 * 4 + 1]]


def test_blocks_behind_the_window_may_come_again() -> None:
    """The token at 10 sees 5 ... 10: block 3 was freed without a word, and is new for any group;
    blocks that are seen are not."""
    for group, start in ((0, 3), (1, 3)):
        tables = _windowed()
        tables.deltas.apply(
            pb.StepRequest(
                scheduled=[_work(1, 10, 1, new_blocks=[_blocks(3, group=group, start=start)])]
            )
        )
        assert tables.state.block_table(1, group)[start] == 3
    for seen in (4, 5, 0, 1, 2):
        tables = _windowed()
        step = pb.StepRequest(scheduled=[_work(1, 10, 1, new_blocks=[_blocks(seen, start=3)])])
        with pytest.raises(MalformedStepError, match=f"KV blocks \\[{seen}\\] repeat a block"):
            tables.deltas.apply(step)


def test_a_window_counts_from_committed_tokens() -> None:
    """While a step may be abandoned, all that it saw stays."""
    tables = Tables(WINDOW)
    blocks = [_blocks(0, 1, 2)]
    step = pb.StepRequest(
        new_requests=[_new(1, 10)], scheduled=[_work(1, 0, 10, new_blocks=blocks)]
    )
    tables.deltas.apply(step)
    again = pb.StepRequest(scheduled=[_work(1, 0, 10, new_blocks=[_blocks(0, start=3)])])
    with pytest.raises(MalformedStepError, match="repeat a block"):
        tables.deltas.apply(again)


def test_a_found_prefix_may_lack_what_is_not_seen() -> None:
    """Of 16 cached tokens a window of six sees 11 ... 15: blocks 0 and 1 may be missing, no more,
    and only at the beginning."""

    def apply(*windowed: pb.BlockAppend) -> Tables:
        tables = Tables(None, WINDOW)
        new_blocks = [_blocks(0, 1, 2, 3, 4), *windowed]
        tables.deltas.apply(
            pb.StepRequest(
                new_requests=[_new(2, 18, num_cached=16)],
                scheduled=[_work(2, 16, 2, new_blocks=new_blocks)],
            )
        )
        return tables

    tables = apply(_blocks(9, 8, 7, group=1, start=2))
    null = tables.state.kv.null_block
    assert tables.state.block_table(2, 1).tolist() == [null, null, 9, 8, 7]
    assert tables.state.block_table(2).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(MalformedStepError, match="start at 3, but the table has 0 and may lack 2"):
        apply(_blocks(9, 8, group=1, start=3))
    with pytest.raises(MalformedStepError, match="start at 4, but the table has 3 and may lack 0"):
        apply(_blocks(9, group=1, start=2), _blocks(7, group=1, start=4))


def test_every_group_needs_blocks() -> None:
    """Tokens without a block in one of the groups are refused."""
    tables = _windowed()
    step = pb.StepRequest(scheduled=[_work(1, 10, 1, new_blocks=[_blocks(6, start=3)])])
    tables.deltas.apply(step)
    tables.slots.commit_computed(np.array([1]), np.array([2]))
    tables.slots.length_S[1] = 13
    with pytest.raises(MalformedStepError, match="tokens end at 13, but its KV blocks hold 12"):
        tables.deltas.apply(pb.StepRequest(scheduled=[_work(1, 12, 1)]))


def test_a_repeated_append_is_harmless_in_each_group() -> None:
    """As a retry of an abandoned step may send it."""
    tables = _windowed()
    before = [tables.state.block_table(1, group).tolist() for group in (0, 1)]
    appends = [_blocks(1, 2, start=1), _blocks(3, 4, 5, group=1)]
    tables.deltas.apply(pb.StepRequest(scheduled=[_work(1, 10, 1, new_blocks=appends)]))
    assert [tables.state.block_table(1, group).tolist() for group in (0, 1)] == before
