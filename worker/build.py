"""Puts an engine together from its config: the one place where the parts of a replica meet."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace

import torch

from pagoda.kernels.dispatch import operators_for
from pagoda.worker.block_hash import HashDomain
from pagoda.worker.block_pool import BlockPool
from pagoda.worker.config import DTYPES, EngineConfig
from pagoda.worker.engine import Engine
from pagoda.worker.engine_plan import EnginePlan, plan_engine, rank_device
from pagoda.worker.errors import ConfigError, RankLostError
from pagoda.worker.executor import Executor
from pagoda.worker.fake_runner import FakeRunner
from pagoda.worker.input_batch import InputBatch
from pagoda.worker.kv_events import KVEventLog
from pagoda.worker.kv_layout import KVLayout
from pagoda.worker.kv_manager import KVManager
from pagoda.worker.load_report import LoadReport, LoadReporter
from pagoda.worker.local_ranks import LOCAL_RANKS
from pagoda.worker.models.checkpoint import checkpoint_shards
from pagoda.worker.models.decoder import Decoder
from pagoda.worker.parallel import SINGLE, TPContext
from pagoda.worker.runner import Runner, default_dtype
from pagoda.worker.scheduler import Scheduler
from pagoda.worker.tensor_parallel import OnLost, RankPlaces, TPExecutor, start_tensor_parallel
from pagoda.worker.types import SequenceOutput
from pagoda.worker.weights import Progress, load_weights, weights_digest

logger = logging.getLogger(__name__)

_COMPUTE_DTYPES = tuple(dtype for dtype in DTYPES if dtype != "auto")


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
        layout=KVLayout.of(plan.spec, dtype=plan.dtype_name, tensor_parallel_size=plan.num_ranks),
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
    limits = plan.limits
    try:
        batch = InputBatch(
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            block_size=plan.spec.block_size,
            num_groups=len(plan.spec.groups),
        )
    except MemoryError as error:
        raise ConfigError(
            "max_model_len",
            f"there is no memory for {limits.max_num_seqs} sequences of up to {limits.max_model_len} tokens",
        ) from error
    model, cache_NL2PKD = load_model(plan, config.num_threads, progress, context)
    return Runner(model, model.ops, cache_NL2PKD, batch)


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


def load_model(
    plan: EnginePlan, num_threads: int | None, progress: Progress, context: TPContext = SINGLE
) -> tuple[Decoder, torch.Tensor]:
    """The model, or a rank's share of it, ready to run, and an empty cache for it: NL2PKD, of the plan's dtype.

    On the CPU it computes with `num_threads`; None: one for each core, which ranks share as if all were here.
    """
    spec = plan.spec
    ops = operators_for(plan.device, plan.dtype, num_threads or max(1, len(os.sched_getaffinity(0)) // context.size))
    with default_dtype(plan.dtype), plan.device:
        model = Decoder(plan.model, ops, spec.places, context)
        cache_NL2PKD = torch.zeros(
            plan.num_blocks,
            spec.layers_per_block,
            spec.vectors_per_head,
            spec.block_size,
            spec.num_kv_heads,
            spec.head_size,
        )
    shards = checkpoint_shards(model)
    load_weights(shards, plan.files, ignored_prefixes=plan.model.ignored_prefixes, progress=progress)
    model.prepare()
    return model, cache_NL2PKD
