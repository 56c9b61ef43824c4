"""An engine on a fake rank that a test can hold up, and a client that waits for its outputs."""

import threading
import time
from collections import Counter
from collections.abc import Callable

from fakes import FakeExecutor, generate

from pagoda.worker.block_hash import HashDomain
from pagoda.worker.block_pool import BlockPool
from pagoda.worker.config import EngineLimits, SchedulerConfig
from pagoda.worker.engine import Engine
from pagoda.worker.kv_events import KVEventLog
from pagoda.worker.kv_layout import KVLayout
from pagoda.worker.kv_manager import KVManager
from pagoda.worker.kv_spec import KVCacheGroup, KVCacheSpec
from pagoda.worker.load_report import LoadReport, LoadReporter
from pagoda.worker.scheduler import Scheduler
from pagoda.worker.types import (
    FinishReason,
    ModelRunnerOutput,
    Request,
    RequestId,
    SamplingParams,
    SchedulerOutput,
    SequenceOutput,
)

BLOCK_SIZE = 4
VOCAB_SIZE = 64
SPEC = KVCacheSpec((KVCacheGroup((0,)),), BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype_bytes=4)
HANG_S = 30.0
"""Longer than anything here takes: waiting this long means it never comes."""


class GatedExecutor(FakeExecutor):
    """Runs no step while its gate is closed, and tells when one has come to the gate."""

    def __init__(self) -> None:
        super().__init__(block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE)
        self.gate = threading.Event()
        self.gate.set()
        self.at_gate = threading.Event()
        self.before_step: Callable[[], None] = lambda: None
        """What happens while a step is computed."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.at_gate.set()
        assert self.gate.wait(HANG_S)
        self.before_step()
        return super().execute(plan)


class Client:
    """An engine on a gated fake rank, and all that came from it."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        max_num_waiting: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = EngineLimits(num_blocks * BLOCK_SIZE, VOCAB_SIZE, max_num_seqs, max_num_waiting)
        log = KVEventLog()
        manager = KVManager(
            BlockPool(num_blocks, log), block_size=BLOCK_SIZE, enable_prefix_caching=True, max_step_tokens=1024
        )
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=16, max_num_waiting=max_num_waiting),
            self.limits,
            manager,
            eos_token_ids=frozenset(),
        )
        self.executor = GatedExecutor()
        self.then: Callable[[], None] | None = None
        """What a test wants done on the engine's thread whenever it has handed over outputs."""
        self.outputs: list[SequenceOutput] = []
        self.reports: list[LoadReport] = []
        self.accepted: list[tuple[str, int]] = []
        self._changed = threading.Condition()
        self.engine = Engine(
            self.scheduler,
            self.executor,
            HashDomain(b"weights", "", "float32", "", BLOCK_SIZE),
            layout=KVLayout.of(SPEC, dtype="float32"),
            on_outputs=self._take,
            reporter=LoadReporter(log, self.reports.append),
            clock=clock,
        )

    def add(
        self,
        name: str,
        num_tokens: int = 6,
        *,
        priority: int = 0,
        salt: bytes = b"",
        timeout_s: float | None = None,
        **sampling: object,
    ) -> None:
        """Add a request, by default greedy."""
        prompt = tuple(range(num_tokens))
        params = SamplingParams(**({"temperature": 0.0} | sampling))
        self.executor.salts[RequestId(name)] = salt
        self.engine.add(Request(RequestId(name), prompt, params, priority=priority, salt=salt, timeout_s=timeout_s))
        self.accepted += [(name, index) for index in range(params.n)]

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return [token for output in self._outputs_of(name, index) for token in output.token_ids]

    def end(self, name: str, index: int = 0) -> SequenceOutput:
        """A sequence's last output; waits for it."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._has_ended(name, index), HANG_S), f"{name} does not end"
            return self._outputs_of(name, index)[-1]

    def reason(self, name: str, index: int = 0) -> FinishReason | None:
        """Why a sequence ended; waits for that."""
        return self.end(name, index).finish_reason

    def wait_for_tokens(self, name: str, num_tokens: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.tokens(name)) >= num_tokens, HANG_S)

    def close(self) -> None:
        """Whatever happened: the thread ends, the executor was shut down once, and each sequence ended once."""
        self.executor.gate.set()
        self.engine.shutdown()
        thread = self.engine._thread
        assert not thread.is_alive()
        if thread.ident is not None:
            assert self.executor.num_shutdowns == 1
            ends = [(output.request_id, output.index) for output in self.outputs if output.finish_reason is not None]
            assert Counter(ends) == Counter(self.accepted)

    def _outputs_of(self, name: str, index: int) -> list[SequenceOutput]:
        return [output for output in self.outputs if (output.request_id, output.index) == (name, index)]

    def _has_ended(self, name: str, index: int) -> bool:
        outputs = self._outputs_of(name, index)
        return bool(outputs) and outputs[-1].finish_reason is not None

    def _take(self, outputs: list[SequenceOutput]) -> None:
        with self._changed:
            self.outputs += outputs
            self._changed.notify_all()
        if self.then is not None:
            self.then()


def expected(num_prompt_tokens: int, sampling: SamplingParams) -> list[int]:
    """What a request with a seed, or a greedy one, gets."""
    seed = sampling.seed or 0
    return generate(range(num_prompt_tokens), sampling, seed, max_model_len=1000, vocab_size=VOCAB_SIZE)[0]


def greedy(num_prompt_tokens: int, max_tokens: int = 16) -> list[int]:
    return expected(num_prompt_tokens, SamplingParams(temperature=0.0, max_tokens=max_tokens))
