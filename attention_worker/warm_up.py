"""Compiles every kernel that a request will use, before there is a request.

Numba compiles a kernel for the types of its first call; the steps below show it prompt rows,
generated rows, greedy and seeded sampling with every change to logits, and log probabilities, in
the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attention_worker.drafts import Speculation
from attention_worker.experts import ExpertClient, Pending, RemoteExperts
from attention_worker.grammar import GrammarMasker
from attention_worker.kv_cache import PagedKvCache
from attention_worker.model import Model
from attention_worker.model_runner import ModelRunner, RunnerLimits
from attention_worker.model_states.paged_kv import PagedKvState
from attention_worker.row_writer import row_writer
from expertmesh.v1 import attention_service_pb2 as pb
from expertmesh.wire_encode import CallId, CallTarget, RequestFrame
from expertmesh_kernels.combine import combine
from expertmesh_kernels.dispatch import as_bits, empty_bits, plan_dispatch, scatter_rows
from expertmesh_kernels.router import Routing

_NO_CALL = CallId(gateway=0, epoch=0, step=0, layer=0, micro_batch=0)
_NOBODY = CallTarget(incarnation=0, model_fingerprint=0)


@dataclass(frozen=True)
class _Zeros:
    """Outputs of experts that answer with zeros."""

    h_TH: Tensor
    routing: Routing
    busy_s: float = 0.0

    def result(self) -> Tensor:
        num_slots = self.routing.topk_ids_TK.size
        outputs_SH = torch.zeros((num_slots, self.h_TH.shape[1]), dtype=self.h_TH.dtype)
        return combine(outputs_SH.to(self.h_TH.device), self.routing.topk_weights_TK)


class ZeroExperts(RemoteExperts):
    """Stands in for expert workers, which may not be known yet: splits and combines rows only.

    Args: those of RemoteExperts.
    """

    def dispatch(
        self,
        layer: int,
        h_TH: Tensor,
        routing: Routing,
        num_generated_rows: int,
        deadline_s: float,
    ) -> Pending:
        """Plans the call, writes its message, drops it, and takes zeros as if they came back."""
        topk_ids_TK = routing.topk_ids_TK
        worker_of_expert_E = np.zeros(self._config.num_experts, np.int32)
        for rows in plan_dispatch(topk_ids_TK, worker_of_expert_E, num_generated_rows):
            frame = RequestFrame(_NO_CALL, _NOBODY, rows, h_TH.shape[1], self._wire_dtype)
            write_rows = row_writer(h_TH.cpu(), self._wire_dtype)
            write_rows(rows.row_ids_R, frame, np.zeros(len(h_TH), np.bool_))
            slots_N = rows.slot_ids_N
            outputs_SH = empty_bits((topk_ids_TK.size, h_TH.shape[1]), self._dtype)
            zeros = np.frombuffer(bytes(outputs_SH.nbytes), outputs_SH.dtype)  # read-only
            zeros_SH = as_bits(zeros.reshape(outputs_SH.shape), self._dtype)
            scatter_rows(zeros_SH, slots_N, self._dtype, outputs_SH)
        return _Zeros(h_TH, routing)


def warm_up(model: Model, kv: PagedKvCache, experts: ExpertClient) -> None:
    """Runs a prompt step and a decode step of two sequences.

    What it writes to the KV pool is never read.

    Args:
        model: What is served.
        kv: Its pool.
        experts: Those that will serve, or `ZeroExperts`.

    Raises:
        RuntimeError: A step fails, so no request could be served either.
    """
    limits = RunnerLimits(
        num_request_slots=2, max_step_tokens=8, speculation=Speculation(num_tokens=1)
    )
    no_grammars = GrammarMasker(None, (), model.config.vocab_size)
    state = PagedKvState(kv, limits.num_request_slots, model.max_model_len)
    runner = ModelRunner(model, experts, state, limits, no_grammars)
    num_tokens = min(2, model.max_model_len - 2)
    num_groups = kv.groups.num_groups
    if num_tokens < 1 or kv.num_blocks < 2 * num_groups or kv.block_size < num_tokens + 2:
        return
    token_ids = np.zeros(num_tokens, "<i4").tobytes()
    greedy = pb.SamplingSpec(temperature=0.0, num_logprobs=1)
    seeded = pb.SamplingSpec(
        temperature=1.0,
        min_p=0.01,
        top_p=0.9,
        top_k=4,
        seed=1,
        presence_penalty=1.0,
        logit_bias=[pb.LogitBias(token_id=0, bias=1.0)],
        bad_words=[pb.TokenSequence(ids=[0])],
        allowed_token_ids=range(min(4, model.config.vocab_size)),
    )
    prompts = pb.StepRequest(step=0)
    decode = pb.StepRequest(step=1)
    for slot, sampling in enumerate((greedy, seeded)):
        prompts.new_requests.add(
            slot=slot, token_ids=token_ids, num_prompt_tokens=num_tokens, sampling=sampling
        )
        work = prompts.scheduled.add(slot=slot, num_tokens=num_tokens, sample=True)
        for group in range(num_groups):
            work.new_blocks.add(group=group, block_ids=[slot * num_groups + group])
        decode.scheduled.add(slot=slot, start=num_tokens, num_tokens=1, sample=True)
    for step in (prompts, decode):
        response = runner.execute(step)
        if response.status != pb.StepResponse.STATUS_DONE:
            raise RuntimeError(f"warm-up step failed: {response.message}")
