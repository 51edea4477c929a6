"""Drives a ModelRunner with real StepRequests: the smallest scheduler that can.

It gives out request slots and KV blocks, sends deltas only, and mixes decode rows and prompt
chunks in one step. Blocks behind sliding windows are taken back as the gateway's scheduler does,
and blocks taken back are filled with NaN. Logits of every sampled position are kept, to be compared
bit by bit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attention_worker.drafts import Speculation
from attention_worker.experts import ExpertClient, LocalExperts
from attention_worker.grammar import GrammarMasker
from attention_worker.kv_cache import PagedKvCache
from attention_worker.loader import load_model
from attention_worker.model_runner import ModelRunner, RunnerLimits
from attention_worker.model_states.paged_kv import PagedKvState
from attention_worker.overlap import Splitter
from expert_worker.store import ExpertStore
from expertmesh.checkpoint import Checkpoint
from expertmesh.model_config import DtypeName, ModelConfig
from expertmesh.settings import ExpertDtype
from expertmesh.v1 import attention_service_pb2 as pb
from expertmesh_kernels.host import TORCH_DTYPES


def local_experts(
    checkpoint: Checkpoint,
    dtype: DtypeName,
    device: str = "cpu",
    expert_dtype: ExpertDtype = "auto",
) -> LocalExperts:
    """All experts of a checkpoint in this process."""
    store = ExpertStore(checkpoint, dtype, device, expert_dtype=expert_dtype)
    for layer in checkpoint.config.moe_layers:
        for expert in range(checkpoint.config.moe_ffn(layer).num_experts):
            store.load(layer, expert)
    return LocalExperts(store)


def make_runner(
    model_dir: Path,
    *,
    dtype: DtypeName = "float32",
    expert_dtype: ExpertDtype = "auto",
    max_model_len: int = 256,
    num_slots: int = 16,
    num_blocks: int = 512,
    block_size: int = 16,
    experts: ExpertClient | None = None,
    speculation: Speculation | None = None,
    sliding_windows: Sequence[int | None] = (),
    device: str = "cpu",
    splitter: Splitter | None = None,
    int8_kv: bool = False,
) -> ModelRunner:
    """A runner of a checkpoint; with its experts in this process, unless others are given.

    Sliding windows of the layers, in turn, replace those of the checkpoint.
    """
    checkpoint = Checkpoint.open(model_dir)
    if sliding_windows:
        checkpoint.config = with_windows(checkpoint.config, sliding_windows)
    place = torch.device(device)
    model = load_model(checkpoint, TORCH_DTYPES[dtype], place, max_model_len)
    kv = PagedKvCache(checkpoint.config, num_blocks, block_size, model.dtype, place, int8=int8_kv)
    return ModelRunner(
        model,
        experts or local_experts(checkpoint, dtype, device, expert_dtype),
        PagedKvState(kv, num_slots, max_model_len),
        RunnerLimits(
            num_request_slots=num_slots,
            max_step_tokens=1024,
            speculation=speculation or Speculation(),
        ),
        GrammarMasker(
            checkpoint.tokenizer_path, checkpoint.config.eos_token_ids, model.config.vocab_size
        ),
        splitter,
    )


def with_windows(config: ModelConfig, sliding_windows: Sequence[int | None]) -> ModelConfig:
    """The model with these sliding windows in its layers, in turn."""
    layers = (
        replace(layer, attention=replace(layer.gqa, sliding_window=window))
        for layer, window in zip(config.layers, cycle(sliding_windows), strict=False)
    )
    return replace(config, layers=tuple(layers))


@dataclass
class DrivenRequest:
    """A request and what became of it."""

    prompt: list[int]
    max_tokens: int
    sampling: pb.SamplingSpec
    slot: int = -1
    tokens: list[int] = field(default_factory=list)
    """Prompt and output."""
    tables: list[list[int]] = field(default_factory=list)
    """Blocks per KV group."""
    num_freed: list[int] = field(default_factory=list)
    """Leading blocks of each table that were given back, since no later token sees them."""
    num_computed: int = 0
    num_drafts: int = 0
    """Tokens that the runner proposes to verify."""
    known: bool = False
    """The runner has been told of it."""
    logits: list[npt.NDArray[np.float32]] = field(default_factory=list)
    """[V] for each output token."""
    sampled: list[pb.SampledToken] = field(default_factory=list)
    prompt_logprobs: list[pb.PromptLogprobs] = field(default_factory=list)
    routed_experts: list[pb.RoutedExperts] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[len(self.prompt) :]

    @property
    def num_left(self) -> int:
        """Tokens to come."""
        return self.max_tokens - len(self.output)

    @property
    def finished(self) -> bool:
        """All tokens are there; end tokens are not looked at."""
        return self.num_left <= 0


class RunnerDriver:
    """Feeds one runner. Requests wait for a free slot in the order of `submit`.

    Args:
        runner: What to drive; its observer of logits is replaced.
        chunk: Most prompt tokens of one request in a step.
        budget: Most tokens of a step; by default what the runner takes.
    """

    def __init__(self, runner: ModelRunner, *, chunk: int = 512, budget: int | None = None) -> None:
        self.runner = runner
        self.chunk = chunk
        self.budget = budget or runner.limits.max_step_tokens
        self.running: list[DrivenRequest] = []
        self.waiting: list[DrivenRequest] = []
        self.step_number = 0
        self._free_slots = list(range(runner.limits.num_request_slots))
        # Taken from the end, so that blocks descend: their order in the pool must not matter.
        self._free_blocks = list(range(runner.state.kv.num_blocks))
        self._freed: list[int] = []
        self._logits: defaultdict[int, list[npt.NDArray[np.float32]]] = defaultdict(list)
        runner.on_logits = self._keep_logits

    def submit(
        self, prompt: Sequence[int], max_tokens: int, sampling: pb.SamplingSpec | None = None
    ) -> DrivenRequest:
        """Queues a request; greedy by default."""
        request = DrivenRequest(
            list(prompt), max_tokens, sampling or pb.SamplingSpec(), tokens=list(prompt)
        )
        self.waiting.append(request)
        return request

    def run(self) -> None:
        """Steps until every request is finished; a step that is not done fails the test."""
        while self.running or self.waiting:
            response = self.step()
            assert response.status == pb.StepResponse.STATUS_DONE, response.message

    def step(self) -> pb.StepResponse:
        """Schedules, executes and commits one step."""
        request = self.next_request()
        response = self.runner.execute(request)
        if response.status == pb.StepResponse.STATUS_DONE:
            self._commit(request, response)
        return response

    def next_request(self) -> pb.StepRequest:
        """The next step; deltas in it count as sent."""
        self._admit()
        self.step_number += 1
        step = pb.StepRequest(step=self.step_number, freed_slots=self._freed)
        self._freed = []
        budget = self.budget
        for request in self.running:
            num_tokens = min(len(request.tokens) - request.num_computed, self.chunk, budget)
            if num_tokens:
                num_tokens += min(request.num_drafts, request.num_left - 1, budget - num_tokens)
                self._schedule(step, request, num_tokens)
                budget -= num_tokens
        return step

    def preempt(self, request: DrivenRequest) -> None:
        """Takes slot and blocks away; the request starts over with the tokens it has."""
        self._release(request)
        request.num_computed = 0
        request.num_drafts = 0
        request.known = False
        self.waiting.insert(0, request)

    def _admit(self) -> None:
        while self.waiting and self._free_slots:
            request = self.waiting.pop(0)
            request.slot = self._free_slots.pop()
            self.running.append(request)

    def _schedule(self, step: pb.StepRequest, request: DrivenRequest, num_tokens: int) -> None:
        if not request.known:
            request.known = True
            request.tables = [[] for _ in self.runner.state.kv.sliding_windows]
            request.num_freed = [0] * len(request.tables)
            step.new_requests.add(
                slot=request.slot,
                token_ids=np.array(request.tokens, "<i4").tobytes(),
                num_prompt_tokens=len(request.prompt),
                sampling=request.sampling,
            )
        end = request.num_computed + num_tokens
        work = step.scheduled.add(
            slot=request.slot,
            start=request.num_computed,
            num_tokens=num_tokens,
            sample=end >= len(request.tokens),
        )
        num_blocks = -(-end // self.runner.state.kv.block_size)
        for group, table in enumerate(request.tables):
            new_blocks = [self._free_blocks.pop() for _ in range(num_blocks - len(table))]
            if new_blocks:
                work.new_blocks.add(group=group, start=len(table), block_ids=new_blocks)
            table.extend(new_blocks)

    def _commit(self, step: pb.StepRequest, response: pb.StepResponse) -> None:
        by_slot = {request.slot: request for request in self.running}
        num_sampled = Counter(token.slot for token in response.sampled)
        for work in step.scheduled:
            request = by_slot[work.slot]
            num_drafts = max(0, work.start + work.num_tokens - len(request.tokens))
            num_accepted = max(0, num_sampled[work.slot] - 1)
            request.num_computed += work.num_tokens - num_drafts + num_accepted
            request.num_drafts = 0
            self._free_unseen(request)
        for drafts in response.drafts:
            by_slot[drafts.slot].num_drafts = drafts.num_drafts
        for logprobs in response.prompt_logprobs:
            by_slot[logprobs.slot].prompt_logprobs.append(logprobs)
        for experts in response.routed_experts:
            by_slot[experts.slot].routed_experts.append(experts)
        for token in response.sampled:
            request = by_slot[token.slot]
            request.tokens.append(token.token_id)
            request.sampled.append(token)
            request.logits.append(self._logits[token.slot].pop(0))
        for request in [request for request in self.running if request.finished]:
            self._release(request)

    def _release(self, request: DrivenRequest) -> None:
        self.running.remove(request)
        self._freed.append(request.slot)
        self._free_slots.append(request.slot)
        for table, num_freed in zip(request.tables, request.num_freed, strict=True):
            self._give_back(table[num_freed:])
        request.tables, request.num_freed = [], []

    def _free_unseen(self, request: DrivenRequest) -> None:
        """Gives back, to be taken next, the blocks behind the windows of the next token."""
        kv = self.runner.state.kv
        for group, window in enumerate(kv.sliding_windows):
            first = 0 if window is None else max(0, request.num_computed - window + 1)
            unseen = request.tables[group][request.num_freed[group] : first // kv.block_size]
            request.num_freed[group] += len(unseen)
            self._give_back(unseen)

    def _give_back(self, blocks: Sequence[int]) -> None:
        """They are taken next; until they are written again nothing may read what is in them."""
        self._free_blocks.extend(blocks)
        pool = self.runner.state.kv.pool
        pool[list(blocks)] = -1 if pool.dtype == torch.int8 else torch.nan  # as a factor it is NaN

    def _keep_logits(self, slots_R: npt.NDArray[np.int64], logits_RV: Tensor) -> None:
        self._logits.clear()
        for slot, logits_V in zip(slots_R.tolist(), logits_RV.cpu().numpy(), strict=True):
            self._logits[slot].append(logits_V.copy())
