"""How far a request has come, as its client sees it, and what to do when the worker that runs it is lost.

    new ──► tried ──► begun ──► ended
             │  ▲       │
             │  │       │ its worker is lost: what has come is kept, and counts as output when it is tried again
             ▼  │       ▼
             again ◄────┘ ... alone on a worker after two deaths without a token between, refused after a third

A request that kills its workers does so at the same place each time, since it goes on from the very state in which it
stopped. One that has got further since the last death is not to blame. No network and no clock.
"""

from collections.abc import Sequence
from dataclasses import replace

from pagoda.cluster.ingress.output_check import OutputCheck
from pagoda.worker.config import EngineLimits
from pagoda.worker.errors import OverloadedError, PagodaError
from pagoda.worker.types import Request, SampleProgress, SequenceOutput, attempt_id

MAX_DEATHS_TOGETHER = 2
"""Workers that may die in a row with a request that gets nowhere, before it runs alone; with one more it is refused."""
MAX_DEATHS = 32
"""Workers that may die with a request in all, however far it gets between."""


class PoisonousRequestError(PagodaError):
    """Workers die with this request again and again, the last one with nothing else running."""


class _Sample:
    """What has come of one sample."""

    __slots__ = ("has_ended", "num_cached_tokens", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.has_ended = False
        self.num_cached_tokens: int | None = None


class RequestProgress:
    """One request's. Not thread-safe."""

    def __init__(self, request: Request, limits: EngineLimits) -> None:
        self._request = request
        self._check = OutputCheck(request, limits)
        self._samples = [_Sample() for _ in range(request.sampling.n)]
        self._num_told_prompt_logprobs = 0
        self._num_attempts = 0
        self._num_deaths = 0
        self._num_deaths_here = 0
        """Since it last got further."""
        self._is_accepted = False
        self._was_accepted = False
        """As this attempt began."""
        self._is_on_worker = False
        self.failure: str | None = None
        """What ended the last attempt, if its worker said so or lied."""

    @property
    def has_ended(self) -> bool:
        return all(sample.has_ended for sample in self._samples)

    @property
    def is_accepted(self) -> bool:
        """Whether a worker has taken it before: it must not be refused any more because there is much to do."""
        return self._is_accepted

    def attempt(self) -> Request:
        """The request as the next worker gets it, under a name of its own."""
        number, self._is_on_worker = self._num_attempts, False
        self._was_accepted = self._is_accepted
        self._num_attempts += 1
        return replace(
            self._request,
            request_id=attempt_id(self._request.request_id, number),
            progress=tuple(SampleProgress(tuple(s.token_ids), s.has_ended) for s in self._samples)
            if self._is_accepted
            else (),
            num_told_prompt_logprobs=self._num_told_prompt_logprobs,
            runs_alone=self._request.runs_alone or self._num_deaths_here >= MAX_DEATHS_TOGETHER,
        )

    def accept(self) -> None:
        """A worker has taken it; one that shall run it alone has begun with it."""
        self._is_accepted = True
        self._is_on_worker = True

    def refuse(self, error: PagodaError) -> None:
        """A worker does not keep it. If that was the first to take it, it is new again: nothing was done for it."""
        if isinstance(error, OverloadedError) and not self._was_accepted:
            self._is_accepted = False
        self._is_on_worker = False

    def take(self, outputs: Sequence[SequenceOutput]) -> list[SequenceOutput]:
        """Remember what came, and return what of it is for the client.

        What a later worker says of cached tokens is corrected to what the first one said. An output that says that the
        worker could not go on, or that no worker can have computed, is the last of its attempt: `failure` says why.
        """
        news = []
        self.accept()
        for output in outputs:
            self.failure = output.error or self._check.problem_with(output)
            if self.failure is not None:
                break
            if not (output.token_ids or output.finish_reason or output.prompt_logprobs):
                continue  # it says only that the worker has taken the request
            self._num_deaths_here = 0
            sample = self._samples[output.index]
            sample.token_ids += output.token_ids
            if output.finish_reason is not None:
                sample.has_ended = True
            if output.prompt_logprobs:
                self._num_told_prompt_logprobs += len(output.prompt_logprobs)
            if sample.num_cached_tokens is None:
                sample.num_cached_tokens = output.num_cached_tokens
            else:
                output.num_cached_tokens = sample.num_cached_tokens
            news.append(output)
        return news

    def complete_sample(self, index: int) -> None:
        """The client needs no more of a sample, whatever its worker says."""
        self._samples[index].has_ended = True

    def lose_worker(self, error: PagodaError) -> None:
        """The worker that ran it is gone. Raises `PoisonousRequestError` if that should not happen to another one.

        One that had not taken it, as far as is known, was not killed by it. Nor was one that waited to run it alone:
        others may have waited there too, behind the one that did it.
        """
        was_there, self._is_on_worker = self._is_on_worker, False
        self._is_accepted = True
        self._num_deaths += was_there
        self._num_deaths_here += was_there
        if self._num_deaths_here > MAX_DEATHS_TOGETHER or self._num_deaths > MAX_DEATHS:
            raise PoisonousRequestError(
                f"{self._num_deaths} workers failed while they ran this request, and it is not tried again: {error}"
            ) from error
