"""The seam between deciding and computing."""

from typing import Protocol

from pagoda.worker.types import ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    """Runs plans. One call at a time; plans come in order and build on each other."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step. If it raises, the plan's sequences are ended and the next plan drops them."""
        ...

    def shutdown(self) -> None:
        """Give up devices and processes."""
        ...
