"""Puts an engine together from its config: the one place where the parts of a replica meet."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pagoda.kernels.dispatch import operators_for
from pagoda.kernels.torch_ops import TorchOperators
from pagoda.worker.block_hash import HashDomain
from pagoda.worker.block_pool import BlockPool
from pagoda.worker.config import DTYPES, GIB, EngineConfig, EngineLimits
from pagoda.worker.engine import Engine
from pagoda.worker.errors import ConfigError, ModelError, RankLostError
from pagoda.worker.executor import Executor
from pagoda.worker.fake_runner import FakeRunner
from pagoda.worker.input_batch import InputBatch
from pagoda.worker.kv_events import KVEventLog
from pagoda.worker.kv_layout import KVLayout
from pagoda.worker.kv_manager import KVManager
from pagoda.worker.kv_spec import KVCacheSpec, group_layers
from pagoda.worker.load_report import LoadReport, LoadReporter
from pagoda.worker.local_ranks import LOCAL_RANKS
from pagoda.worker.memory import available_bytes
from pagoda.worker.models.config import ModelConfig
from pagoda.worker.models.decoder import Decoder
from pagoda.worker.models.families import read_model_config
from pagoda.worker.parallel import SINGLE, TPContext
from pagoda.worker.runner import Runner, default_dtype
from pagoda.worker.scheduler import Scheduler
from pagoda.worker.tensor_parallel import OnLost, RankPlaces, TPExecutor, start_tensor_parallel
from pagoda.worker.types import SequenceOutput
from pagoda.worker.weights import Progress, check_weights, checkpoint_files, load_weights, weights_digest

logger = logging.getLogger(__name__)

_COMPUTE_DTYPES = tuple(dtype for dtype in DTYPES if dtype != "auto")


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What an engine will be, known before anything is loaded."""

    model: ModelConfig
    files: list[Path]
    """Checkpoint files."""
    device: torch.device
    dtype_name: str
    spec: KVCacheSpec
    num_blocks: int
    limits: EngineLimits

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype_name)
        return dtype


def plan_engine(config: EngineConfig, *, num_engines: int = 1) -> EnginePlan:
    """Check a config against the model folder and the memory, in milliseconds.

    `num_engines` such engines are to run on this host.

    Raises:
        ModelError: the model folder cannot be used.
        ConfigError: a setting contradicts the model, the memory or the machine.
    """
    model = read_model_config(config.model_path)
    files = checkpoint_files(config.model_path)
    dtype_name = model.dtype if config.dtype == "auto" else config.dtype
    if dtype_name not in _COMPUTE_DTYPES:
        choices = ", ".join(_COMPUTE_DTYPES)
        raise ModelError(f"{config.model_path}: dtype {dtype_name} is not supported; choose one of {choices}")
    spec = KVCacheSpec(
        groups=group_layers([layer.window for layer in model.layers]),
        block_size=config.cache.block_size,
        num_kv_heads=model.num_kv_heads,
        head_size=model.head_size,
        dtype_bytes=getattr(torch, dtype_name).itemsize,
    )
    num_blocks = config.cache.num_blocks or spec.num_blocks_in(config.cache.memory_bytes)
    limits = _limits(config, model, spec, num_blocks)
    device = _device(config.device)
    if device.type == "cpu" and config.fake_step_s is None:
        weight_bytes = sum(path.stat().st_size for path in files)
        _check_memory(num_blocks * spec.block_bytes, weight_bytes, num_engines)
    with torch.device("meta"):
        shards = Decoder(model, TorchOperators()).checkpoint_shards()
    check_weights(shards, files, ignored_prefixes=model.ignored_prefixes)
    return EnginePlan(model, files, device, dtype_name, spec, num_blocks, limits)


def build_engine(
    config: EngineConfig,
    *,
    on_outputs: Callable[[list[SequenceOutput]], None],
    progress: Progress,
    wrap_executor: Callable[[Executor], Executor] = lambda executor: executor,
    on_report: Callable[[LoadReport], None] | None = None,
    rank_places: RankPlaces = LOCAL_RANKS,
    on_lost: OnLost | None = None,
) -> Engine:
    """Load the model and return an engine that is not started yet.

    Args:
        on_outputs: see `Engine`.
        rank_places: where the ranks are, if the model is shared by several.
        on_lost: called, on any thread, when one of these is lost, before the engine dies of it.
        progress: told how far loading is.
        on_report: told after each step what has changed; see `LoadReporter`.
        wrap_executor: gets the executor and returns the one that the engine uses, which may look at what passes.

    Raises as `plan_engine` does, `ModelError` for a checkpoint that does not fit its config, and `RankLostError` if a
    rank cannot start.
    """
    plan = plan_engine(config)
    executor = _build_executor(plan, config, rank_places, progress)
    logger.info(
        "%s: %d layers, %s on %s; KV cache of %d blocks, %d tokens, %.2f GiB",
        config.model_path.name,
        plan.model.num_layers,
        plan.dtype_name,
        plan.device,
        plan.num_blocks,
        plan.num_blocks * plan.spec.block_size // len(plan.spec.groups),
        plan.num_blocks * plan.spec.block_bytes / 2**30,
    )
    progress("hashing weights", 0, 1)
    domain = HashDomain(
        weights_digest=weights_digest(config.model_path, plan.files),
        weight_quantization="",
        dtype=plan.dtype_name,
        rope=plan.model.rope_text,
        block_size=plan.spec.block_size,
    )
    progress("hashing weights", 1, 1)
    log = None if on_report is None else KVEventLog(plan.spec.announced_as)
    manager = KVManager(
        BlockPool(plan.num_blocks, log),
        windows=plan.spec.windows,
        block_size=plan.spec.block_size,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        max_step_tokens=config.scheduler.max_num_batched_tokens,
    )
    engine = Engine(
        Scheduler(config.scheduler, plan.limits, manager, eos_token_ids=plan.model.eos_token_ids),
        wrap_executor(executor),
        domain,
        layout=KVLayout.of(plan.spec, dtype=plan.dtype_name),
        on_outputs=on_outputs,
        reporter=None if on_report is None or log is None else LoadReporter(log, on_report),
    )

    def lose(error: RankLostError) -> None:
        if on_lost is not None:
            on_lost(error)
        engine.abandon(error)

    if isinstance(executor, TPExecutor):
        executor.watch(lose)
    return engine


def build_rank(plan: EnginePlan, config: EngineConfig, context: TPContext, progress: Progress) -> Executor:
    """One rank's part of the plan, in this process."""
    if config.fake_step_s is not None:
        return FakeRunner(
            step_s=config.fake_step_s,
            token_s=config.fake_token_s,
            vocab_size=plan.model.vocab_size,
            context=context,
        )
    if context.size > 1:  # TP: model side
        raise ConfigError("tensor_parallel_size", "real models cannot be shared yet")
    return _load(plan, config.num_threads, progress)


def rank_device(plan: EnginePlan, config: EngineConfig) -> torch.device:
    """Where a rank's tensors are, those of a fake always on the CPU."""
    return plan.device if config.fake_step_s is None else torch.device("cpu")


def _build_executor(plan: EnginePlan, config: EngineConfig, places: RankPlaces, progress: Progress) -> Executor:
    """What executes plans, on as many ranks as the config says."""
    if config.tensor_parallel_size == 1:
        return build_rank(plan, config, SINGLE, progress)
    device = rank_device(plan, config)
    return start_tensor_parallel(
        replace(config, device=str(device)),
        places,
        device,
        lambda context: build_rank(plan, config, context, progress),
    )


def load_model(plan: EnginePlan, num_threads: int | None, progress: Progress) -> tuple[Decoder, torch.Tensor]:
    """The model, ready to run, and an empty cache for it: NL2PKD, of the plan's dtype and device.

    On the CPU it computes with `num_threads`; None: one for each core that this process may use.
    """
    spec = plan.spec
    ops = operators_for(plan.device, plan.dtype, num_threads or len(os.sched_getaffinity(0)))
    with default_dtype(plan.dtype), plan.device:
        model = Decoder(plan.model, ops, spec.places)
        cache_NL2PKD = torch.zeros(
            plan.num_blocks,
            spec.layers_per_block,
            spec.vectors_per_head,
            spec.block_size,
            spec.num_kv_heads,
            spec.head_size,
        )
    shards = model.checkpoint_shards()
    load_weights(shards, plan.files, ignored_prefixes=plan.model.ignored_prefixes, progress=progress)
    model.prepare()
    return model, cache_NL2PKD


def _load(plan: EnginePlan, num_threads: int | None, progress: Progress) -> Runner:
    model, cache_NL2PKD = load_model(plan, num_threads, progress)
    batch = InputBatch(
        max_num_seqs=plan.limits.max_num_seqs,
        max_model_len=plan.limits.max_model_len,
        block_size=plan.spec.block_size,
        num_groups=len(plan.spec.groups),
    )
    return Runner(model, model.ops, cache_NL2PKD, batch)


def _check_memory(cache_bytes: int, weight_bytes: int, num_engines: int) -> None:
    """Memory that is asked for and is not there ends in the kernel's killer, long after the start."""
    available = available_bytes()
    if available is not None and num_engines * (cache_bytes + weight_bytes) > available:
        times = "" if num_engines == 1 else f"{num_engines} times "
        raise ConfigError(
            "memory_bytes",
            f"{times}{cache_bytes / GIB:.1f} GiB of KV cache and {weight_bytes / GIB:.1f} GiB of weights "
            f"are more than the {available / GIB:.1f} GiB of memory that are available",
        )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError("device", f"{name!r} is not a torch device") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("device", f"{name!r} is not supported; supported: cpu, cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", f"{name!r} is asked for, but torch sees no GPU")
    return device


def _limits(config: EngineConfig, model: ModelConfig, spec: KVCacheSpec, num_blocks: int) -> EngineLimits:
    """The longest context is the smallest of what was asked for, what the model can and what the pool holds."""
    pool_tokens = spec.num_tokens_in(num_blocks, max_step_tokens=config.scheduler.max_num_batched_tokens)
    asked = config.max_model_len
    if asked is not None and asked > model.max_position:
        raise ConfigError("max_model_len", f"{asked} is more than this model can, {model.max_position}")
    if asked is not None and asked > pool_tokens:
        raise ConfigError("max_model_len", f"{asked} tokens do not fit the KV cache, which holds {pool_tokens}")
    limits = EngineLimits(
        max_model_len=asked or model.max_position,
        vocab_size=model.vocab_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_waiting=config.scheduler.max_num_waiting,
    )
    if limits.max_model_len > pool_tokens:
        logger.warning("the KV cache holds %d tokens: contexts are limited to that", pool_tokens)
        limits = replace(limits, max_model_len=pool_tokens)
    return limits
