from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]
TIER_DEVICE: Tier
TIER_HOST: Tier
TIER_DISK: Tier

class WorkerUpdate(_message.Message):
    __slots__ = ("hello", "events", "snapshot", "load", "goodbye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    events: EventBatch
    snapshot: Snapshot
    load: LoadReport
    goodbye: Goodbye
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., events: _Optional[_Union[EventBatch, _Mapping]] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., load: _Optional[_Union[LoadReport, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("worker_id", "epoch", "model", "fingerprint", "block_size", "windows", "last_seq", "num_blocks", "max_num_seqs", "layout", "tensor_parallel_size")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    model: str
    fingerprint: bytes
    block_size: int
    windows: _containers.RepeatedScalarFieldContainer[int]
    last_seq: int
    num_blocks: int
    max_num_seqs: int
    layout: bytes
    tensor_parallel_size: int
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., model: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., block_size: _Optional[int] = ..., windows: _Optional[_Iterable[int]] = ..., last_seq: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., layout: _Optional[bytes] = ..., tensor_parallel_size: _Optional[int] = ...) -> None: ...

class EventBatch(_message.Message):
    __slots__ = ("epoch", "seq", "events")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    seq: int
    events: _containers.RepeatedCompositeFieldContainer[BlockEvent]
    def __init__(self, epoch: _Optional[int] = ..., seq: _Optional[int] = ..., events: _Optional[_Iterable[_Union[BlockEvent, _Mapping]]] = ...) -> None: ...

class BlockEvent(_message.Message):
    __slots__ = ("stored", "removed", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: Blocks
    removed: Blocks
    cleared: AllBlocksCleared
    def __init__(self, stored: _Optional[_Union[Blocks, _Mapping]] = ..., removed: _Optional[_Union[Blocks, _Mapping]] = ..., cleared: _Optional[_Union[AllBlocksCleared, _Mapping]] = ...) -> None: ...

class Blocks(_message.Message):
    __slots__ = ("tier", "group", "hashes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    group: int
    hashes: bytes
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., group: _Optional[int] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class AllBlocksCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("epoch", "seq", "blocks", "is_first", "is_last")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IS_FIRST_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    seq: int
    blocks: _containers.RepeatedCompositeFieldContainer[Blocks]
    is_first: bool
    is_last: bool
    def __init__(self, epoch: _Optional[int] = ..., seq: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[Blocks, _Mapping]]] = ..., is_first: _Optional[bool] = ..., is_last: _Optional[bool] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("num_uncached_tokens", "num_running", "num_waiting", "num_free_blocks", "num_empty_blocks", "rates", "admitted", "finished", "is_complete", "last_seq", "num_uncached_pairs")
    NUM_UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_EMPTY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    NUM_UNCACHED_PAIRS_FIELD_NUMBER: _ClassVar[int]
    num_uncached_tokens: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_empty_blocks: int
    rates: Rates
    admitted: _containers.RepeatedScalarFieldContainer[str]
    finished: _containers.RepeatedScalarFieldContainer[str]
    is_complete: bool
    last_seq: int
    num_uncached_pairs: int
    def __init__(self, num_uncached_tokens: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_empty_blocks: _Optional[int] = ..., rates: _Optional[_Union[Rates, _Mapping]] = ..., admitted: _Optional[_Iterable[str]] = ..., finished: _Optional[_Iterable[str]] = ..., is_complete: _Optional[bool] = ..., last_seq: _Optional[int] = ..., num_uncached_pairs: _Optional[int] = ...) -> None: ...

class Rates(_message.Message):
    __slots__ = ("prefill_s_per_token", "prefill_s_per_token_and_context", "step_s_per_sequence", "released_blocks_per_s", "restore_s_per_token", "evicted_hit_ratio", "mean_output_tokens", "busy_ratio", "step_base_s")
    PREFILL_S_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_PER_TOKEN_AND_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    STEP_S_PER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RELEASED_BLOCKS_PER_S_FIELD_NUMBER: _ClassVar[int]
    RESTORE_S_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EVICTED_HIT_RATIO_FIELD_NUMBER: _ClassVar[int]
    MEAN_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUSY_RATIO_FIELD_NUMBER: _ClassVar[int]
    STEP_BASE_S_FIELD_NUMBER: _ClassVar[int]
    prefill_s_per_token: float
    prefill_s_per_token_and_context: float
    step_s_per_sequence: float
    released_blocks_per_s: float
    restore_s_per_token: float
    evicted_hit_ratio: float
    mean_output_tokens: float
    busy_ratio: float
    step_base_s: float
    def __init__(self, prefill_s_per_token: _Optional[float] = ..., prefill_s_per_token_and_context: _Optional[float] = ..., step_s_per_sequence: _Optional[float] = ..., released_blocks_per_s: _Optional[float] = ..., restore_s_per_token: _Optional[float] = ..., evicted_hit_ratio: _Optional[float] = ..., mean_output_tokens: _Optional[float] = ..., busy_ratio: _Optional[float] = ..., step_base_s: _Optional[float] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DirectoryAck(_message.Message):
    __slots__ = ("status", "last_seq", "directory_id")
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OK: _ClassVar[DirectoryAck.Status]
        OUT_OF_RANGE: _ClassVar[DirectoryAck.Status]
        DATA_LOSS: _ClassVar[DirectoryAck.Status]
    OK: DirectoryAck.Status
    OUT_OF_RANGE: DirectoryAck.Status
    DATA_LOSS: DirectoryAck.Status
    STATUS_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    status: DirectoryAck.Status
    last_seq: int
    directory_id: str
    def __init__(self, status: _Optional[_Union[DirectoryAck.Status, str]] = ..., last_seq: _Optional[int] = ..., directory_id: _Optional[str] = ...) -> None: ...

class PlaceRequest(_message.Message):
    __slots__ = ("request_id", "model", "hashes", "num_tokens", "num_samples", "max_output_tokens", "exclude", "placed_on", "reservation_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_FIELD_NUMBER: _ClassVar[int]
    PLACED_ON_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    hashes: bytes
    num_tokens: int
    num_samples: int
    max_output_tokens: int
    exclude: _containers.RepeatedScalarFieldContainer[str]
    placed_on: str
    reservation_ms: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., hashes: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., num_samples: _Optional[int] = ..., max_output_tokens: _Optional[int] = ..., exclude: _Optional[_Iterable[str]] = ..., placed_on: _Optional[str] = ..., reservation_ms: _Optional[int] = ...) -> None: ...

class PlaceResponse(_message.Message):
    __slots__ = ("ranked", "reason", "plan")
    RANKED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    ranked: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    plan: Plan
    def __init__(self, ranked: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("cached_tokens", "lower_tokens", "uncached_tokens", "queue_s", "restore_s", "prefill_s", "block_wait_s", "decode_penalty_s", "eviction_s", "crowding_s")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOWER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    RESTORE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    BLOCK_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_PENALTY_S_FIELD_NUMBER: _ClassVar[int]
    EVICTION_S_FIELD_NUMBER: _ClassVar[int]
    CROWDING_S_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    lower_tokens: int
    uncached_tokens: int
    queue_s: float
    restore_s: float
    prefill_s: float
    block_wait_s: float
    decode_penalty_s: float
    eviction_s: float
    crowding_s: float
    def __init__(self, cached_tokens: _Optional[int] = ..., lower_tokens: _Optional[int] = ..., uncached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., restore_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., block_wait_s: _Optional[float] = ..., decode_penalty_s: _Optional[float] = ..., eviction_s: _Optional[float] = ..., crowding_s: _Optional[float] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("model", "hashes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    model: str
    hashes: bytes
    def __init__(self, model: _Optional[str] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[HeldPrefix]
    def __init__(self, workers: _Optional[_Iterable[_Union[HeldPrefix, _Mapping]]] = ...) -> None: ...

class HeldPrefix(_message.Message):
    __slots__ = ("worker_id", "num_blocks", "num_device_blocks", "num_predicted_blocks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREDICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    num_blocks: int
    num_device_blocks: int
    num_predicted_blocks: int
    def __init__(self, worker_id: _Optional[str] = ..., num_blocks: _Optional[int] = ..., num_device_blocks: _Optional[int] = ..., num_predicted_blocks: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("period_ms",)
    PERIOD_MS_FIELD_NUMBER: _ClassVar[int]
    period_ms: int
    def __init__(self, period_ms: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DirectoryStats(_message.Message):
    __slots__ = ("directory_id", "uptime_s", "workers", "num_entries", "placements", "placed_tokens", "placed_cached_tokens", "block_events", "reservations", "reservation_ends", "truncated_prompts", "stream_events")
    class PlacementsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ReservationEndsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class StreamEventsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    DIRECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    PLACED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PLACED_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_EVENTS_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ENDS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    STREAM_EVENTS_FIELD_NUMBER: _ClassVar[int]
    directory_id: str
    uptime_s: float
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStats]
    num_entries: int
    placements: _containers.ScalarMap[str, int]
    placed_tokens: int
    placed_cached_tokens: int
    block_events: int
    reservations: int
    reservation_ends: _containers.ScalarMap[str, int]
    truncated_prompts: int
    stream_events: _containers.ScalarMap[str, int]
    def __init__(self, directory_id: _Optional[str] = ..., uptime_s: _Optional[float] = ..., workers: _Optional[_Iterable[_Union[WorkerStats, _Mapping]]] = ..., num_entries: _Optional[int] = ..., placements: _Optional[_Mapping[str, int]] = ..., placed_tokens: _Optional[int] = ..., placed_cached_tokens: _Optional[int] = ..., block_events: _Optional[int] = ..., reservations: _Optional[int] = ..., reservation_ends: _Optional[_Mapping[str, int]] = ..., truncated_prompts: _Optional[int] = ..., stream_events: _Optional[_Mapping[str, int]] = ...) -> None: ...

class WorkerStats(_message.Message):
    __slots__ = ("worker_id", "model", "epoch", "last_seq", "is_exact", "num_blocks_held", "num_blocks", "num_free_blocks", "num_running", "num_waiting", "max_num_seqs", "num_uncached_tokens", "reserved_tokens", "reserved_sequences", "rates", "silent_s", "placements", "placed_tokens", "placed_cached_tokens", "layout", "tensor_parallel_size")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    IS_EXACT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_HELD_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    PLACED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PLACED_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    model: str
    epoch: int
    last_seq: int
    is_exact: bool
    num_blocks_held: _containers.RepeatedScalarFieldContainer[int]
    num_blocks: int
    num_free_blocks: int
    num_running: int
    num_waiting: int
    max_num_seqs: int
    num_uncached_tokens: int
    reserved_tokens: int
    reserved_sequences: int
    rates: Rates
    silent_s: float
    placements: int
    placed_tokens: int
    placed_cached_tokens: int
    layout: bytes
    tensor_parallel_size: int
    def __init__(self, worker_id: _Optional[str] = ..., model: _Optional[str] = ..., epoch: _Optional[int] = ..., last_seq: _Optional[int] = ..., is_exact: _Optional[bool] = ..., num_blocks_held: _Optional[_Iterable[int]] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., num_uncached_tokens: _Optional[int] = ..., reserved_tokens: _Optional[int] = ..., reserved_sequences: _Optional[int] = ..., rates: _Optional[_Union[Rates, _Mapping]] = ..., silent_s: _Optional[float] = ..., placements: _Optional[int] = ..., placed_tokens: _Optional[int] = ..., placed_cached_tokens: _Optional[int] = ..., layout: _Optional[bytes] = ..., tensor_parallel_size: _Optional[int] = ...) -> None: ...
