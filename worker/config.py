"""An engine's settings: validated when made, resolved once, never written again."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from pagoda.worker.errors import ConfigError

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
GIB = 2**30


def require_in_range(name: str, value: float, low: float, high: float) -> None:
    """Raise `ConfigError` naming the setting unless low <= value <= high."""
    if not low <= value <= high:
        raise ConfigError(name, f"must be between {low} and {high}, got {value}")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache on the device."""

    block_size: int = 16
    """Tokens per block."""
    memory_bytes: int = GIB
    """Memory for KV blocks; unused if `num_blocks` is given."""
    num_blocks: int | None = None
    """Blocks in the pool; None takes as many as fit `memory_bytes`."""
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        require_in_range("block_size", self.block_size, 1, 1024)
        if self.num_blocks is None:
            require_in_range("memory_bytes", self.memory_bytes, 1, 2**50)
        else:
            require_in_range("num_blocks", self.num_blocks, 1, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What one step may hold."""

    max_num_seqs: int = 64
    """Sequences that run at once."""
    max_num_batched_tokens: int = 1024
    """Tokens computed in one step; longer prompts are computed in chunks."""
    max_num_waiting: int = 4096
    """Sequences that may wait; if one more comes, the newest of the tenant that has most waiting is refused."""
    max_wait_s: float | None = None
    """Seconds in which a new request must get its first token; if it no longer can, it is refused. None: any."""

    def __post_init__(self) -> None:
        require_in_range("max_num_seqs", self.max_num_seqs, 1, 65536)
        require_in_range("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**24)
        require_in_range("max_num_waiting", self.max_num_waiting, 1, 2**24)
        if self.max_wait_s is not None:
            require_in_range("max_wait_s", self.max_wait_s, 0.001, 2**24)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything one replica is built from."""

    model_path: Path
    """A Hugging Face model folder."""
    dtype: Dtype = "auto"
    """Computation type; auto takes the checkpoint's."""
    device: str = "auto"
    """A torch device, such as `cpu` or `cuda:0`; auto takes a GPU where there is one."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; None takes the model's own."""
    num_threads: int | None = None
    """CPU threads for tensor work, of each rank; None takes torch's default."""
    tensor_parallel_size: int = 1
    """Processes, the *ranks*, that share the model; each holds a part of it on a device of its own."""
    fake_step_s: float | None = None
    """Run no model: every step takes this long, and tokens follow from those before. For load tests."""
    fake_token_s: float = 0.0
    """What each token that a fake step computes adds to it."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError("dtype", f"must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.max_model_len is not None:
            require_in_range("max_model_len", self.max_model_len, 2, 2**24)
        if self.num_threads is not None:
            require_in_range("num_threads", self.num_threads, 1, 4096)
        require_in_range("tensor_parallel_size", self.tensor_parallel_size, 1, 1024)
        if self.fake_step_s is not None:
            require_in_range("fake_step_s", self.fake_step_s, 0, 60)
        require_in_range("fake_token_s", self.fake_token_s, 0, 1)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a request must respect to be accepted. An ingress checks the same limits before it sends one."""

    max_model_len: int
    """Longest prompt plus output, tokens: the model's, the config's and the pool's smallest."""
    vocab_size: int
    max_num_seqs: int
    """Sequences that run at once."""
    max_num_waiting: int
    """Sequences that may wait."""
