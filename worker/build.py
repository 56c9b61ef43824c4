"""Puts an engine together from its config: the one place where the parts of a replica meet."""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from pagoda.kernels.dispatch import operators_for
from pagoda.worker.block_hash import HashDomain
from pagoda.worker.block_pool import BlockPool
from pagoda.worker.config import EngineConfig, EngineLimits
from pagoda.worker.engine import Engine
from pagoda.worker.errors import ConfigError
from pagoda.worker.input_batch import InputBatch
from pagoda.worker.kv_manager import KVManager
from pagoda.worker.kv_spec import KVCacheGroup, KVCacheSpec
from pagoda.worker.models.config import ModelConfig
from pagoda.worker.models.llama import LlamaModel
from pagoda.worker.runner import Runner, default_dtype
from pagoda.worker.scheduler import Scheduler
from pagoda.worker.types import SequenceOutput
from pagoda.worker.weights import Progress, checkpoint_files, load_weights, weights_digest

logger = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig,
    *,
    on_outputs: Callable[[list[SequenceOutput]], None],
    progress: Progress,
) -> Engine:
    """Load the model and return an engine that is not started yet.

    Args:
        on_outputs: see `Engine`.
        progress: told how far loading is.

    Raises:
        ModelError: the model folder cannot be used.
        ConfigError: a setting contradicts the model or the memory.
    """
    model_config = ModelConfig.from_folder(config.model_path)
    files = checkpoint_files(config.model_path)
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device)
    dtype_name = model_config.dtype if config.dtype == "auto" else config.dtype
    dtype = getattr(torch, dtype_name)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)

    spec = KVCacheSpec(
        groups=(KVCacheGroup("full", model_config.num_layers),),
        block_size=config.cache.block_size,
        num_kv_heads=model_config.num_kv_heads,
        head_size=model_config.head_size,
        dtype_bytes=dtype.itemsize,
    )
    num_blocks = config.cache.num_blocks or spec.num_blocks_in(config.cache.memory_bytes)
    limits = _limits(config, model_config, num_blocks)

    ops = operators_for(device)
    with default_dtype(dtype), torch.device(device):
        model = LlamaModel(model_config, ops)
        cache_NL2PKD = torch.zeros(
            num_blocks, model_config.num_layers, 2, spec.block_size, spec.num_kv_heads, spec.head_size
        )
    load_weights(model.checkpoint_views(), files, progress=progress)
    model.prepare()
    logger.info(
        "%s: %d layers, %s on %s; KV cache of %d blocks, %d tokens, %.2f GiB",
        config.model_path.name,
        model_config.num_layers,
        dtype_name,
        device,
        num_blocks,
        num_blocks * spec.block_size,
        num_blocks * spec.block_bytes / 2**30,
    )

    manager = KVManager(
        BlockPool(num_blocks),
        num_groups=len(spec.groups),
        block_size=spec.block_size,
        enable_prefix_caching=config.cache.enable_prefix_caching,
    )
    batch = InputBatch(
        max_num_seqs=limits.max_num_seqs, max_model_len=limits.max_model_len, block_size=spec.block_size
    )
    progress("hashing weights", 0, 1)
    domain = HashDomain(
        weights_digest=weights_digest(config.model_path, files),
        weight_quantization="",
        dtype=dtype_name,
        rope=json.dumps(asdict(model_config.rope), sort_keys=True),
        block_size=spec.block_size,
    )
    progress("hashing weights", 1, 1)
    return Engine(
        Scheduler(config.scheduler, limits, manager, eos_token_ids=model_config.eos_token_ids),
        Runner(model, ops, cache_NL2PKD, batch),
        domain,
        on_outputs=on_outputs,
    )


def _limits(config: EngineConfig, model: ModelConfig, num_blocks: int) -> EngineLimits:
    """The longest context is the smallest of what was asked for, what the model can and what the pool holds."""
    pool_tokens = num_blocks * config.cache.block_size
    asked = config.max_model_len
    if asked is not None and asked > model.max_position:
        raise ConfigError(f"max_model_len: {asked} is more than this model can, {model.max_position}")
    if asked is not None and asked > pool_tokens:
        raise ConfigError(f"max_model_len: {asked} tokens do not fit the KV cache, which holds {pool_tokens}")
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
