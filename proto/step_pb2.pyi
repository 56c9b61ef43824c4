from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StepPlan(_message.Message):
    __slots__ = ("step", "named", "numbers", "dropped", "started", "updated", "updated_groups", "updated_indexes", "updated_blocks", "copied_from", "copied_to", "computes_the_same", "scheduled", "scheduled_tokens")
    STEP_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    UPDATED_FIELD_NUMBER: _ClassVar[int]
    UPDATED_GROUPS_FIELD_NUMBER: _ClassVar[int]
    UPDATED_INDEXES_FIELD_NUMBER: _ClassVar[int]
    UPDATED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COPIED_FROM_FIELD_NUMBER: _ClassVar[int]
    COPIED_TO_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_THE_SAME_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    step: int
    named: _containers.RepeatedScalarFieldContainer[bytes]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    dropped: _containers.RepeatedScalarFieldContainer[int]
    started: _containers.RepeatedCompositeFieldContainer[StartedSequence]
    updated: _containers.RepeatedScalarFieldContainer[int]
    updated_groups: _containers.RepeatedScalarFieldContainer[int]
    updated_indexes: _containers.RepeatedScalarFieldContainer[int]
    updated_blocks: _containers.RepeatedScalarFieldContainer[int]
    copied_from: _containers.RepeatedScalarFieldContainer[int]
    copied_to: _containers.RepeatedScalarFieldContainer[int]
    computes_the_same: bool
    scheduled: _containers.RepeatedScalarFieldContainer[int]
    scheduled_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., named: _Optional[_Iterable[bytes]] = ..., numbers: _Optional[_Iterable[int]] = ..., dropped: _Optional[_Iterable[int]] = ..., started: _Optional[_Iterable[_Union[StartedSequence, _Mapping]]] = ..., updated: _Optional[_Iterable[int]] = ..., updated_groups: _Optional[_Iterable[int]] = ..., updated_indexes: _Optional[_Iterable[int]] = ..., updated_blocks: _Optional[_Iterable[int]] = ..., copied_from: _Optional[_Iterable[int]] = ..., copied_to: _Optional[_Iterable[int]] = ..., computes_the_same: _Optional[bool] = ..., scheduled: _Optional[_Iterable[int]] = ..., scheduled_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class StartedSequence(_message.Message):
    __slots__ = ("number", "token_ids", "num_output_tokens", "num_computed_tokens", "num_shared_tokens", "block_tables", "sampling", "seed", "eos_token_ids", "next_prompt_logprob")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PROMPT_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    number: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_output_tokens: int
    num_computed_tokens: int
    num_shared_tokens: int
    block_tables: _containers.RepeatedCompositeFieldContainer[BlockTable]
    sampling: StepSampling
    seed: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    next_prompt_logprob: int
    def __init__(self, number: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_output_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_shared_tokens: _Optional[int] = ..., block_tables: _Optional[_Iterable[_Union[BlockTable, _Mapping]]] = ..., sampling: _Optional[_Union[StepSampling, _Mapping]] = ..., seed: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., next_prompt_logprob: _Optional[int] = ...) -> None: ...

class BlockTable(_message.Message):
    __slots__ = ("block_ids",)
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StepSampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "biased_token_ids", "biases", "seed", "n", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "logprobs", "prompt_logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIASED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BIASES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    biased_token_ids: _containers.RepeatedScalarFieldContainer[int]
    biases: _containers.RepeatedScalarFieldContainer[float]
    seed: int
    n: int
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[bytes]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    logprobs: int
    prompt_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., biased_token_ids: _Optional[_Iterable[int]] = ..., biases: _Optional[_Iterable[float]] = ..., seed: _Optional[int] = ..., n: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[bytes]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., include_stop_str_in_output: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...
