"""What an engine will be, found out from its config, the model's folder and the machine before anything is loaded."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pagoda.kernels.torch_ops import TorchOperators
from pagoda.worker.config import DTYPES, GIB, EngineConfig, EngineLimits
from pagoda.worker.errors import ConfigError, ModelError
from pagoda.worker.kv_spec import KVCacheSpec, group_layers
from pagoda.worker.memory import available_bytes
from pagoda.worker.models.checkpoint import checkpoint_shards
from pagoda.worker.models.config import ModelConfig
from pagoda.worker.models.decoder import Decoder
from pagoda.worker.models.families import read_model_config
from pagoda.worker.parallel import TPContext
from pagoda.worker.weights import check_weights, checkpoint_files

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
    num_ranks: int
    """That share the model."""
    spec: KVCacheSpec
    """Of one rank."""
    num_blocks: int
    """The same on every rank."""
    limits: EngineLimits

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype_name)
        return dtype


def plan_engine(config: EngineConfig, *, num_ranks_here: int = 1) -> EnginePlan:
    """Check a config against the model folder and the memory, in milliseconds.

    `num_ranks_here` of its ranks, or of such engines', are to run on this host.

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
    num_ranks = config.tensor_parallel_size
    is_fake = config.fake_step_s is not None
    spec = KVCacheSpec(
        groups=group_layers([layer.window for layer in model.layers]),
        block_size=config.cache.block_size,
        # Without a model to run any number of ranks can share it.
        num_kv_heads=model.num_kv_heads if is_fake else model.on_one_of(num_ranks).num_kv_heads,
        head_size=model.head_size,
        dtype_bytes=getattr(torch, dtype_name).itemsize,
    )
    num_blocks = config.cache.num_blocks or spec.num_blocks_in(config.cache.memory_bytes)
    limits = _limits(config, model, spec, num_blocks)
    device = _device(config.device)
    if device.type == "cpu" and not is_fake:
        weight_bytes = sum(path.stat().st_size for path in files) // num_ranks
        _check_memory(num_blocks * spec.block_bytes, weight_bytes, num_ranks_here)
    with torch.device("meta"):
        context = TPContext(size=1 if is_fake else num_ranks)
        shards = checkpoint_shards(Decoder(model, TorchOperators(), context=context))
    check_weights(shards, files, ignored_prefixes=model.ignored_prefixes)
    return EnginePlan(model, files, device, dtype_name, num_ranks, spec, num_blocks, limits)


def rank_device(plan: EnginePlan, config: EngineConfig) -> torch.device:
    """Where a rank's tensors are, those of a fake always on the CPU."""
    return plan.device if config.fake_step_s is None else torch.device("cpu")


def _check_memory(cache_bytes: int, weight_bytes: int, num_ranks: int) -> None:
    """Memory that is asked for and is not there ends in the kernel's killer, long after the start."""
    available = available_bytes()
    if available is not None and num_ranks * (cache_bytes + weight_bytes) > available:
        times = "" if num_ranks == 1 else f"{num_ranks} times "
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
    if not pool_tokens:
        raise ConfigError("num_blocks", f"must be at least {len(spec.groups)}, one for each group of layers")
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
