from expertmesh.v1 import expert_service_pb2 as _expert_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvGroup(_message.Message):
    __slots__ = ("sliding_window",)
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    sliding_window: int
    def __init__(self, sliding_window: _Optional[int] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("incarnation", "protocol_revision", "model", "numerics_fingerprint", "device", "num_kv_blocks", "kv_block_size", "kv_block_bytes", "num_request_slots", "max_step_tokens", "max_model_len", "colocated", "kv_groups")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_REVISION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUEST_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    COLOCATED_FIELD_NUMBER: _ClassVar[int]
    KV_GROUPS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    protocol_revision: int
    model: _expert_service_pb2.ModelIdentity
    numerics_fingerprint: bytes
    device: str
    num_kv_blocks: int
    kv_block_size: int
    kv_block_bytes: int
    num_request_slots: int
    max_step_tokens: int
    max_model_len: int
    colocated: bool
    kv_groups: _containers.RepeatedCompositeFieldContainer[KvGroup]
    def __init__(self, incarnation: _Optional[int] = ..., protocol_revision: _Optional[int] = ..., model: _Optional[_Union[_expert_service_pb2.ModelIdentity, _Mapping]] = ..., numerics_fingerprint: _Optional[bytes] = ..., device: _Optional[str] = ..., num_kv_blocks: _Optional[int] = ..., kv_block_size: _Optional[int] = ..., kv_block_bytes: _Optional[int] = ..., num_request_slots: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., max_model_len: _Optional[int] = ..., colocated: _Optional[bool] = ..., kv_groups: _Optional[_Iterable[_Union[KvGroup, _Mapping]]] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingSpec(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "num_logprobs", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "stop_token_ids", "grammar", "num_prompt_logprobs", "return_routed_experts")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RETURN_ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    num_logprobs: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    grammar: str
    num_prompt_logprobs: int
    return_routed_experts: bool
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., num_logprobs: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., grammar: _Optional[str] = ..., num_prompt_logprobs: _Optional[int] = ..., return_routed_experts: _Optional[bool] = ...) -> None: ...

class NewRequest(_message.Message):
    __slots__ = ("slot", "token_ids", "num_prompt_tokens", "sampling", "num_cached")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    slot: int
    token_ids: bytes
    num_prompt_tokens: int
    sampling: SamplingSpec
    num_cached: int
    def __init__(self, slot: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[SamplingSpec, _Mapping]] = ..., num_cached: _Optional[int] = ...) -> None: ...

class BlockAppend(_message.Message):
    __slots__ = ("group", "start", "block_ids")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    group: int
    start: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[int] = ..., start: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ScheduledRequest(_message.Message):
    __slots__ = ("slot", "start", "num_tokens", "sample", "new_blocks")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    start: int
    num_tokens: int
    sample: bool
    new_blocks: _containers.RepeatedCompositeFieldContainer[BlockAppend]
    def __init__(self, slot: _Optional[int] = ..., start: _Optional[int] = ..., num_tokens: _Optional[int] = ..., sample: _Optional[bool] = ..., new_blocks: _Optional[_Iterable[_Union[BlockAppend, _Mapping]]] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("step", "freed_slots", "new_requests", "scheduled", "time_limit_ms", "after_step", "cautious")
    STEP_FIELD_NUMBER: _ClassVar[int]
    FREED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NEW_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_MS_FIELD_NUMBER: _ClassVar[int]
    AFTER_STEP_FIELD_NUMBER: _ClassVar[int]
    CAUTIOUS_FIELD_NUMBER: _ClassVar[int]
    step: int
    freed_slots: _containers.RepeatedScalarFieldContainer[int]
    new_requests: _containers.RepeatedCompositeFieldContainer[NewRequest]
    scheduled: _containers.RepeatedCompositeFieldContainer[ScheduledRequest]
    time_limit_ms: int
    after_step: int
    cautious: bool
    def __init__(self, step: _Optional[int] = ..., freed_slots: _Optional[_Iterable[int]] = ..., new_requests: _Optional[_Iterable[_Union[NewRequest, _Mapping]]] = ..., scheduled: _Optional[_Iterable[_Union[ScheduledRequest, _Mapping]]] = ..., time_limit_ms: _Optional[int] = ..., after_step: _Optional[int] = ..., cautious: _Optional[bool] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("slot", "start", "num_tokens", "num_top", "logprobs", "top_ids", "top_logprobs")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    start: int
    num_tokens: int
    num_top: int
    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes
    def __init__(self, slot: _Optional[int] = ..., start: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_top: _Optional[int] = ..., logprobs: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class RoutedExperts(_message.Message):
    __slots__ = ("slot", "start", "num_tokens", "num_layers", "top_k", "expert_ids")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    EXPERT_IDS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    start: int
    num_tokens: int
    num_layers: int
    top_k: int
    expert_ids: bytes
    def __init__(self, slot: _Optional[int] = ..., start: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_layers: _Optional[int] = ..., top_k: _Optional[int] = ..., expert_ids: _Optional[bytes] = ...) -> None: ...

class SlotDrafts(_message.Message):
    __slots__ = ("slot", "num_drafts")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    num_drafts: int
    def __init__(self, slot: _Optional[int] = ..., num_drafts: _Optional[int] = ...) -> None: ...

class SlotFailure(_message.Message):
    __slots__ = ("slot", "message")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    slot: int
    message: str
    def __init__(self, slot: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class SampledToken(_message.Message):
    __slots__ = ("slot", "token_id", "logprob", "top_logprobs")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    token_id: int
    logprob: float
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, slot: _Optional[int] = ..., token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: StepRequest
    def __init__(self, step: _Optional[_Union[StepRequest, _Mapping]] = ...) -> None: ...

class RunResponse(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: StepResponse
    def __init__(self, step: _Optional[_Union[StepResponse, _Mapping]] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("step", "status", "sampled", "missing", "message", "duration_us", "expert_wait_us", "nonfinite_slots", "prompt_logprobs", "routed_experts", "drafts", "num_drafts_verified", "num_drafts_accepted", "failures", "dispatch_us", "sampling_us", "suspect_slots", "lethal_layer", "degraded_slots")
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATUS_UNSPECIFIED: _ClassVar[StepResponse.Status]
        STATUS_DONE: _ClassVar[StepResponse.Status]
        STATUS_PAUSED: _ClassVar[StepResponse.Status]
        STATUS_FAILED: _ClassVar[StepResponse.Status]
        STATUS_SKIPPED: _ClassVar[StepResponse.Status]
        STATUS_LETHAL: _ClassVar[StepResponse.Status]
    STATUS_UNSPECIFIED: StepResponse.Status
    STATUS_DONE: StepResponse.Status
    STATUS_PAUSED: StepResponse.Status
    STATUS_FAILED: StepResponse.Status
    STATUS_SKIPPED: StepResponse.Status
    STATUS_LETHAL: StepResponse.Status
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DURATION_US_FIELD_NUMBER: _ClassVar[int]
    EXPERT_WAIT_US_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_US_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_US_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    LETHAL_LAYER_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    status: StepResponse.Status
    sampled: _containers.RepeatedCompositeFieldContainer[SampledToken]
    missing: _containers.RepeatedCompositeFieldContainer[_expert_service_pb2.ExpertId]
    message: str
    duration_us: int
    expert_wait_us: int
    nonfinite_slots: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    routed_experts: _containers.RepeatedCompositeFieldContainer[RoutedExperts]
    drafts: _containers.RepeatedCompositeFieldContainer[SlotDrafts]
    num_drafts_verified: int
    num_drafts_accepted: int
    failures: _containers.RepeatedCompositeFieldContainer[SlotFailure]
    dispatch_us: int
    sampling_us: int
    suspect_slots: _containers.RepeatedScalarFieldContainer[int]
    lethal_layer: int
    degraded_slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., status: _Optional[_Union[StepResponse.Status, str]] = ..., sampled: _Optional[_Iterable[_Union[SampledToken, _Mapping]]] = ..., missing: _Optional[_Iterable[_Union[_expert_service_pb2.ExpertId, _Mapping]]] = ..., message: _Optional[str] = ..., duration_us: _Optional[int] = ..., expert_wait_us: _Optional[int] = ..., nonfinite_slots: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ..., routed_experts: _Optional[_Iterable[_Union[RoutedExperts, _Mapping]]] = ..., drafts: _Optional[_Iterable[_Union[SlotDrafts, _Mapping]]] = ..., num_drafts_verified: _Optional[int] = ..., num_drafts_accepted: _Optional[int] = ..., failures: _Optional[_Iterable[_Union[SlotFailure, _Mapping]]] = ..., dispatch_us: _Optional[int] = ..., sampling_us: _Optional[int] = ..., suspect_slots: _Optional[_Iterable[int]] = ..., lethal_layer: _Optional[int] = ..., degraded_slots: _Optional[_Iterable[int]] = ...) -> None: ...

class ExpertMapWorker(_message.Message):
    __slots__ = ("worker_id", "address", "incarnation", "layers", "row_credits", "leaving")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    ROW_CREDITS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    incarnation: int
    layers: _containers.RepeatedCompositeFieldContainer[_expert_service_pb2.LayerExperts]
    row_credits: int
    leaving: bool
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[_expert_service_pb2.LayerExperts, _Mapping]]] = ..., row_credits: _Optional[int] = ..., leaving: _Optional[bool] = ...) -> None: ...

class ExpertMapUpdate(_message.Message):
    __slots__ = ("epoch", "gateway", "workers")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    gateway: int
    workers: _containers.RepeatedCompositeFieldContainer[ExpertMapWorker]
    def __init__(self, epoch: _Optional[int] = ..., gateway: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[ExpertMapWorker, _Mapping]]] = ...) -> None: ...

class MembershipRequest(_message.Message):
    __slots__ = ("expert_map",)
    EXPERT_MAP_FIELD_NUMBER: _ClassVar[int]
    expert_map: ExpertMapUpdate
    def __init__(self, expert_map: _Optional[_Union[ExpertMapUpdate, _Mapping]] = ...) -> None: ...

class ExpertObservation(_message.Message):
    __slots__ = ("worker_id", "incarnation", "calls", "faults", "rows_out", "rows_back", "bytes_out", "bytes_back", "round_trip_us", "compute_us", "last_fault", "hedges", "retries", "late_replies", "ejections", "damaged", "late_calls", "retries_by_cause", "slowness_percent")
    class RetriesByCauseEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_OUT_FIELD_NUMBER: _ClassVar[int]
    ROWS_BACK_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    BYTES_BACK_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    LAST_FAULT_FIELD_NUMBER: _ClassVar[int]
    HEDGES_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    LATE_REPLIES_FIELD_NUMBER: _ClassVar[int]
    EJECTIONS_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    LATE_CALLS_FIELD_NUMBER: _ClassVar[int]
    RETRIES_BY_CAUSE_FIELD_NUMBER: _ClassVar[int]
    SLOWNESS_PERCENT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    calls: int
    faults: int
    rows_out: int
    rows_back: int
    bytes_out: int
    bytes_back: int
    round_trip_us: int
    compute_us: int
    last_fault: str
    hedges: int
    retries: int
    late_replies: int
    ejections: int
    damaged: int
    late_calls: int
    retries_by_cause: _containers.ScalarMap[str, int]
    slowness_percent: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., calls: _Optional[int] = ..., faults: _Optional[int] = ..., rows_out: _Optional[int] = ..., rows_back: _Optional[int] = ..., bytes_out: _Optional[int] = ..., bytes_back: _Optional[int] = ..., round_trip_us: _Optional[int] = ..., compute_us: _Optional[int] = ..., last_fault: _Optional[str] = ..., hedges: _Optional[int] = ..., retries: _Optional[int] = ..., late_replies: _Optional[int] = ..., ejections: _Optional[int] = ..., damaged: _Optional[int] = ..., late_calls: _Optional[int] = ..., retries_by_cause: _Optional[_Mapping[str, int]] = ..., slowness_percent: _Optional[int] = ...) -> None: ...

class MembershipResponse(_message.Message):
    __slots__ = ("epoch", "observations", "num_dropped_pairs", "gate_rows")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_PAIRS_FIELD_NUMBER: _ClassVar[int]
    GATE_ROWS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    observations: _containers.RepeatedCompositeFieldContainer[ExpertObservation]
    num_dropped_pairs: int
    gate_rows: bytes
    def __init__(self, epoch: _Optional[int] = ..., observations: _Optional[_Iterable[_Union[ExpertObservation, _Mapping]]] = ..., num_dropped_pairs: _Optional[int] = ..., gate_rows: _Optional[bytes] = ...) -> None: ...
