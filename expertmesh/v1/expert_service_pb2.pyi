from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Dtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[Dtype]
    DTYPE_FLOAT32: _ClassVar[Dtype]
    DTYPE_BFLOAT16: _ClassVar[Dtype]
    DTYPE_FLOAT16: _ClassVar[Dtype]
    DTYPE_INT8: _ClassVar[Dtype]

class ExpertState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXPERT_STATE_UNSPECIFIED: _ClassVar[ExpertState]
    EXPERT_STATE_LOADING: _ClassVar[ExpertState]
    EXPERT_STATE_RESIDENT: _ClassVar[ExpertState]
    EXPERT_STATE_RETIRING: _ClassVar[ExpertState]
    EXPERT_STATE_UNLOADED: _ClassVar[ExpertState]
    EXPERT_STATE_FAILED: _ClassVar[ExpertState]
DTYPE_UNSPECIFIED: Dtype
DTYPE_FLOAT32: Dtype
DTYPE_BFLOAT16: Dtype
DTYPE_FLOAT16: Dtype
DTYPE_INT8: Dtype
EXPERT_STATE_UNSPECIFIED: ExpertState
EXPERT_STATE_LOADING: ExpertState
EXPERT_STATE_RESIDENT: ExpertState
EXPERT_STATE_RETIRING: ExpertState
EXPERT_STATE_UNLOADED: ExpertState
EXPERT_STATE_FAILED: ExpertState

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data", "row_scales")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ROW_SCALES_FIELD_NUMBER: _ClassVar[int]
    dtype: Dtype
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    row_scales: bytes
    def __init__(self, dtype: _Optional[_Union[Dtype, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., row_scales: _Optional[bytes] = ...) -> None: ...

class CallId(_message.Message):
    __slots__ = ("gateway", "epoch", "step", "layer", "micro_batch", "attempt")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    gateway: int
    epoch: int
    step: int
    layer: int
    micro_batch: int
    attempt: int
    def __init__(self, gateway: _Optional[int] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., layer: _Optional[int] = ..., micro_batch: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class ForwardRequest(_message.Message):
    __slots__ = ("id", "incarnation", "model_fingerprint", "hidden_states", "row_offsets", "expert_ids", "num_generated_rows", "time_left_us", "checksum")
    ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    ROW_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_ROWS_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_US_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    id: CallId
    incarnation: int
    model_fingerprint: int
    hidden_states: Tensor
    row_offsets: bytes
    expert_ids: bytes
    num_generated_rows: int
    time_left_us: int
    checksum: int
    def __init__(self, id: _Optional[_Union[CallId, _Mapping]] = ..., incarnation: _Optional[int] = ..., model_fingerprint: _Optional[int] = ..., hidden_states: _Optional[_Union[Tensor, _Mapping]] = ..., row_offsets: _Optional[bytes] = ..., expert_ids: _Optional[bytes] = ..., num_generated_rows: _Optional[int] = ..., time_left_us: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class ForwardResponse(_message.Message):
    __slots__ = ("id", "incarnation", "outputs", "error", "queue_us", "compute_us", "row_credits", "checksum")
    ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    ROW_CREDITS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    id: CallId
    incarnation: int
    outputs: Tensor
    error: ForwardError
    queue_us: int
    compute_us: int
    row_credits: int
    checksum: int
    def __init__(self, id: _Optional[_Union[CallId, _Mapping]] = ..., incarnation: _Optional[int] = ..., outputs: _Optional[_Union[Tensor, _Mapping]] = ..., error: _Optional[_Union[ForwardError, _Mapping]] = ..., queue_us: _Optional[int] = ..., compute_us: _Optional[int] = ..., row_credits: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class ForwardError(_message.Message):
    __slots__ = ("code", "message", "expert_ids")
    class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CODE_UNSPECIFIED: _ClassVar[ForwardError.Code]
        CODE_INVALID_ARGUMENT: _ClassVar[ForwardError.Code]
        CODE_EXPERT_NOT_RESIDENT: _ClassVar[ForwardError.Code]
        CODE_STALE_INCARNATION: _ClassVar[ForwardError.Code]
        CODE_WRONG_MODEL: _ClassVar[ForwardError.Code]
        CODE_DATA_LOSS: _ClassVar[ForwardError.Code]
        CODE_NONFINITE_INPUT: _ClassVar[ForwardError.Code]
        CODE_RESOURCE_EXHAUSTED: _ClassVar[ForwardError.Code]
        CODE_DEADLINE_EXCEEDED: _ClassVar[ForwardError.Code]
        CODE_DRAINING: _ClassVar[ForwardError.Code]
        CODE_INTERNAL: _ClassVar[ForwardError.Code]
    CODE_UNSPECIFIED: ForwardError.Code
    CODE_INVALID_ARGUMENT: ForwardError.Code
    CODE_EXPERT_NOT_RESIDENT: ForwardError.Code
    CODE_STALE_INCARNATION: ForwardError.Code
    CODE_WRONG_MODEL: ForwardError.Code
    CODE_DATA_LOSS: ForwardError.Code
    CODE_NONFINITE_INPUT: ForwardError.Code
    CODE_RESOURCE_EXHAUSTED: ForwardError.Code
    CODE_DEADLINE_EXCEEDED: ForwardError.Code
    CODE_DRAINING: ForwardError.Code
    CODE_INTERNAL: ForwardError.Code
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_IDS_FIELD_NUMBER: _ClassVar[int]
    code: ForwardError.Code
    message: str
    expert_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, code: _Optional[_Union[ForwardError.Code, str]] = ..., message: _Optional[str] = ..., expert_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("heartbeat_ms", "hands_over")
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    HANDS_OVER_FIELD_NUMBER: _ClassVar[int]
    heartbeat_ms: int
    hands_over: bool
    def __init__(self, heartbeat_ms: _Optional[int] = ..., hands_over: _Optional[bool] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("worker_id", "incarnation", "protocol_revision", "model", "numerics_fingerprint", "device", "capacity", "layers", "draining", "load", "row_credits", "sequence", "node", "drain")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_REVISION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ROW_CREDITS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    protocol_revision: int
    model: ModelIdentity
    numerics_fingerprint: bytes
    device: str
    capacity: Capacity
    layers: _containers.RepeatedCompositeFieldContainer[LayerExperts]
    draining: bool
    load: LoadCounters
    row_credits: int
    sequence: int
    node: str
    drain: DrainProgress
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., protocol_revision: _Optional[int] = ..., model: _Optional[_Union[ModelIdentity, _Mapping]] = ..., numerics_fingerprint: _Optional[bytes] = ..., device: _Optional[str] = ..., capacity: _Optional[_Union[Capacity, _Mapping]] = ..., layers: _Optional[_Iterable[_Union[LayerExperts, _Mapping]]] = ..., draining: _Optional[bool] = ..., load: _Optional[_Union[LoadCounters, _Mapping]] = ..., row_credits: _Optional[int] = ..., sequence: _Optional[int] = ..., node: _Optional[str] = ..., drain: _Optional[_Union[DrainProgress, _Mapping]] = ...) -> None: ...

class DrainProgress(_message.Message):
    __slots__ = ("experts_left", "calls_in_flight", "time_left_ms")
    EXPERTS_LEFT_FIELD_NUMBER: _ClassVar[int]
    CALLS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    experts_left: int
    calls_in_flight: int
    time_left_ms: int
    def __init__(self, experts_left: _Optional[int] = ..., calls_in_flight: _Optional[int] = ..., time_left_ms: _Optional[int] = ...) -> None: ...

class ModelIdentity(_message.Message):
    __slots__ = ("fingerprint", "name", "num_layers", "num_experts", "hidden_size", "dtype", "expert_dtype")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    name: str
    num_layers: int
    num_experts: int
    hidden_size: int
    dtype: Dtype
    expert_dtype: str
    def __init__(self, fingerprint: _Optional[bytes] = ..., name: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_experts: _Optional[int] = ..., hidden_size: _Optional[int] = ..., dtype: _Optional[_Union[Dtype, str]] = ..., expert_dtype: _Optional[str] = ...) -> None: ...

class Capacity(_message.Message):
    __slots__ = ("expert_slots", "used_expert_slots", "bytes_per_expert", "resident_bytes")
    EXPERT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    USED_EXPERT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_EXPERT_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    expert_slots: int
    used_expert_slots: int
    bytes_per_expert: int
    resident_bytes: int
    def __init__(self, expert_slots: _Optional[int] = ..., used_expert_slots: _Optional[int] = ..., bytes_per_expert: _Optional[int] = ..., resident_bytes: _Optional[int] = ...) -> None: ...

class LayerExperts(_message.Message):
    __slots__ = ("layer", "resident", "retiring", "pairs", "fingerprints")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    RETIRING_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    resident: _containers.RepeatedScalarFieldContainer[int]
    retiring: _containers.RepeatedScalarFieldContainer[int]
    pairs: _containers.RepeatedScalarFieldContainer[int]
    fingerprints: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[int] = ..., resident: _Optional[_Iterable[int]] = ..., retiring: _Optional[_Iterable[int]] = ..., pairs: _Optional[_Iterable[int]] = ..., fingerprints: _Optional[_Iterable[int]] = ...) -> None: ...

class LoadCounters(_message.Message):
    __slots__ = ("calls", "errors", "rows", "pairs", "compute_us", "queued_calls", "streams", "queue_us", "calls_by_wait", "uptime_us", "cpu_us", "rss_bytes")
    CALLS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    QUEUED_CALLS_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    CALLS_BY_WAIT_FIELD_NUMBER: _ClassVar[int]
    UPTIME_US_FIELD_NUMBER: _ClassVar[int]
    CPU_US_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    calls: int
    errors: int
    rows: int
    pairs: int
    compute_us: int
    queued_calls: int
    streams: int
    queue_us: int
    calls_by_wait: _containers.RepeatedScalarFieldContainer[int]
    uptime_us: int
    cpu_us: int
    rss_bytes: int
    def __init__(self, calls: _Optional[int] = ..., errors: _Optional[int] = ..., rows: _Optional[int] = ..., pairs: _Optional[int] = ..., compute_us: _Optional[int] = ..., queued_calls: _Optional[int] = ..., streams: _Optional[int] = ..., queue_us: _Optional[int] = ..., calls_by_wait: _Optional[_Iterable[int]] = ..., uptime_us: _Optional[int] = ..., cpu_us: _Optional[int] = ..., rss_bytes: _Optional[int] = ...) -> None: ...

class ExpertId(_message.Message):
    __slots__ = ("layer", "expert")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    layer: int
    expert: int
    def __init__(self, layer: _Optional[int] = ..., expert: _Optional[int] = ...) -> None: ...

class LoadExpertsRequest(_message.Message):
    __slots__ = ("incarnation", "leader_token", "experts")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEADER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    leader_token: int
    experts: _containers.RepeatedCompositeFieldContainer[ExpertId]
    def __init__(self, incarnation: _Optional[int] = ..., leader_token: _Optional[int] = ..., experts: _Optional[_Iterable[_Union[ExpertId, _Mapping]]] = ...) -> None: ...

class LoadExpertsResponse(_message.Message):
    __slots__ = ("expert", "state", "message")
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    expert: ExpertId
    state: ExpertState
    message: str
    def __init__(self, expert: _Optional[_Union[ExpertId, _Mapping]] = ..., state: _Optional[_Union[ExpertState, str]] = ..., message: _Optional[str] = ...) -> None: ...

class UnloadExpertsRequest(_message.Message):
    __slots__ = ("incarnation", "leader_token", "experts", "retire_ms")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEADER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    RETIRE_MS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    leader_token: int
    experts: _containers.RepeatedCompositeFieldContainer[ExpertId]
    retire_ms: int
    def __init__(self, incarnation: _Optional[int] = ..., leader_token: _Optional[int] = ..., experts: _Optional[_Iterable[_Union[ExpertId, _Mapping]]] = ..., retire_ms: _Optional[int] = ...) -> None: ...

class UnloadExpertsResponse(_message.Message):
    __slots__ = ("expert", "state", "message")
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    expert: ExpertId
    state: ExpertState
    message: str
    def __init__(self, expert: _Optional[_Union[ExpertId, _Mapping]] = ..., state: _Optional[_Union[ExpertState, str]] = ..., message: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("incarnation", "timeout_ms")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    timeout_ms: int
    def __init__(self, incarnation: _Optional[int] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("calls_in_flight", "drained", "experts_left")
    CALLS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_LEFT_FIELD_NUMBER: _ClassVar[int]
    calls_in_flight: int
    drained: bool
    experts_left: int
    def __init__(self, calls_in_flight: _Optional[int] = ..., drained: _Optional[bool] = ..., experts_left: _Optional[int] = ...) -> None: ...
