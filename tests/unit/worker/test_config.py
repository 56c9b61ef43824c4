"""Settings and requests out of range are refused with the name of what is wrong."""

from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from pagoda.worker.config import CacheConfig, EngineConfig, EngineLimits, SchedulerConfig
from pagoda.worker.engine import check_request
from pagoda.worker.errors import ConfigError, InvalidRequestError
from pagoda.worker.types import MAX_LOGIT_BIASES, MAX_LOGPROBS, MAX_SAMPLES, MAX_SEED, MAX_STOP_STRINGS, SamplingParams

NAN, INF = float("nan"), float("inf")
LIMITS = EngineLimits(max_model_len=20, vocab_size=100, max_num_seqs=4, max_num_waiting=8)


def engine_config(**settings: object) -> EngineConfig:
    return EngineConfig(Path("model"), **settings)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (CacheConfig, "block_size", 0),
        (CacheConfig, "block_size", 1025),
        (CacheConfig, "memory_bytes", 0),
        (CacheConfig, "memory_bytes", NAN),
        (CacheConfig, "memory_bytes", INF),
        (CacheConfig, "num_blocks", 0),
        (CacheConfig, "num_blocks", 2**31),
        (SchedulerConfig, "max_num_seqs", 0),
        (SchedulerConfig, "max_num_seqs", 65537),
        (SchedulerConfig, "max_num_batched_tokens", 0),
        (SchedulerConfig, "max_num_batched_tokens", 2**24 + 1),
        (SchedulerConfig, "max_num_waiting", 0),
        (SchedulerConfig, "max_num_waiting", 2**24 + 1),
        (engine_config, "dtype", "int8"),
        (engine_config, "max_model_len", 1),
        (engine_config, "max_model_len", 2**24 + 1),
        (engine_config, "num_threads", 0),
        (engine_config, "num_threads", 4097),
        (engine_config, "tensor_parallel_size", 0),
        (engine_config, "tensor_parallel_size", 1025),
    ],
)
def test_setting_out_of_range(make: type, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: must be .*{value}"):
        make(**{name: value})


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (CacheConfig, {"block_size": 1, "memory_bytes": 1}),
        (CacheConfig, {"block_size": 1024, "num_blocks": 1}),
        (SchedulerConfig, {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_num_waiting": 1}),
        (engine_config, {"dtype": "float32", "max_model_len": 2, "num_threads": 1}),
    ],
)
def test_limits_of_the_ranges_are_allowed(make: type, settings: dict[str, object]) -> None:
    config = make(**settings)
    assert {name: getattr(config, name) for name in settings} == settings


def test_memory_is_not_checked_where_the_blocks_are_counted() -> None:
    assert CacheConfig(num_blocks=5, memory_bytes=0).num_blocks == 5


def test_config_is_never_written() -> None:
    with pytest.raises(FrozenInstanceError):
        engine_config().dtype = "float32"


def test_defaults_are_valid() -> None:
    SamplingParams().validate()
    assert engine_config().cache == CacheConfig()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature", INF),
        ("temperature", -INF),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", NAN),
        ("top_p", INF),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("min_p", NAN),
        ("min_p", INF),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
        ("n", 0),
        ("n", MAX_SAMPLES + 1),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("stop", ("x",) * (MAX_STOP_STRINGS + 1)),
        ("stop", ("x", "")),
        ("stop_token_ids", (3, -1)),
        *((name, value) for name in ("presence_penalty", "frequency_penalty") for value in (-2.01, 2.01, NAN, INF)),
        *(("repetition_penalty", value) for value in (0.0, -1.0, NAN, INF)),
        *(("logit_bias", {5: value}) for value in (-100.1, 100.1, NAN, INF)),
        ("logit_bias", {3: 1.0, -1: 1.0}),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1.0)),
        *((name, value) for name in ("logprobs", "prompt_logprobs") for value in (-1, MAX_LOGPROBS + 1)),
    ],
)
def test_parameter_out_of_range(name: str, value: object) -> None:
    """`min_tokens` 17 is more than the default of `max_tokens`, 16."""
    with pytest.raises(InvalidRequestError, match=f"^{name}: must be ") as error:
        SamplingParams(**{name: value}).validate()
    assert error.value.field == name


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"top_k": -1},
        {"top_k": 10**6},
        {"top_p": 1e-9},
        {"top_p": 1.0},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"seed": 0},
        {"seed": MAX_SEED},
        {"n": MAX_SAMPLES},
        {"max_tokens": 1},
        {"max_tokens": 5, "min_tokens": 5},
        {"max_tokens": None, "min_tokens": 1000},
        {"stop": ("x",) * MAX_STOP_STRINGS},
        {"stop_token_ids": (0,)},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 1e-9},
        {"repetition_penalty": 1e9},
        {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIASES), -100.0)},
        {"logprobs": 0, "prompt_logprobs": MAX_LOGPROBS},
        {"logprobs": MAX_LOGPROBS, "prompt_logprobs": 0},
    ],
)
def test_parameter_at_its_limit(sampling: dict[str, object]) -> None:
    SamplingParams(**sampling).validate()


@pytest.mark.parametrize(
    ("prompt", "sampling", "field"),
    [
        ((), {}, "prompt"),
        ((1, 100), {}, "prompt"),
        ((1, -1), {}, "prompt"),
        ((1,) * 20, {"max_tokens": None}, "prompt"),
        ((1,) * 21, {"max_tokens": 1}, "prompt"),
        ((1,) * 10, {"max_tokens": 11}, "max_tokens"),
        ((1,) * 10, {"max_tokens": None, "min_tokens": 11}, "min_tokens"),
        ((1,), {"stop_token_ids": (100,)}, "stop_token_ids"),
        ((1,), {"logit_bias": {99: 1.0, 100: 1.0}}, "logit_bias"),
        ((1,), {"n": 13}, "n"),
        ((1,), {"temperature": NAN}, "temperature"),
    ],
)
def test_request_that_can_never_be_served(prompt: tuple[int, ...], sampling: dict[str, object], field: str) -> None:
    """A context of 20 tokens, a vocabulary of 100, 4 that may run and 8 that may wait."""
    with pytest.raises(InvalidRequestError) as error:
        check_request(prompt, SamplingParams(**sampling), LIMITS)
    assert error.value.field == field
    assert error.value.message


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        ((0, 99), {}),
        ((1,) * 19, {"max_tokens": 1}),
        ((1,) * 19, {"max_tokens": None}),
        ((1,) * 10, {"max_tokens": 10, "min_tokens": 10}),
        ((1,), {"stop_token_ids": (99,), "n": 8}),
        ((1,), {"logit_bias": {0: 1.0, 99: 1.0}}),
    ],
)
def test_request_at_the_limits_is_accepted(prompt: tuple[int, ...], sampling: dict[str, object]) -> None:
    check_request(prompt, SamplingParams(**sampling), LIMITS)
    check_request(iter(prompt), replace(SamplingParams(**sampling), seed=1), LIMITS)


@pytest.mark.parametrize(
    ("num_tokens", "prompt_logprobs", "is_allowed"),
    [
        (2**20, 0, True),
        (2**20, 1, False),
        (2**20 // 21, 20, True),
        (2**20 // 21 + 1, 20, False),
    ],
)
def test_prompt_logprobs_of_a_long_prompt(num_tokens: int, prompt_logprobs: int, is_allowed: bool) -> None:
    """Together they are bounded, so that one request cannot fill the memory of an ingress."""
    limits = replace(LIMITS, max_model_len=2**21)
    sampling = SamplingParams(prompt_logprobs=prompt_logprobs)
    if is_allowed:
        check_request((1,) * num_tokens, sampling, limits)
    else:
        with pytest.raises(InvalidRequestError, match=r"^prompt_logprobs: of"):
            check_request((1,) * num_tokens, sampling, limits)
