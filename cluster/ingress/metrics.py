"""What an ingress process measures, and `/metrics`: its own series and those of all workers. Workers measure requests.

With several ingress processes a scrape reaches one of them. All of them show every worker's series; their own have the
label `ingress`, so that counts of different processes are not taken for one.
"""

from collections.abc import Sequence

from pagoda.cluster.ingress.refusals import REASONS
from pagoda.worker.instruments import PREFIX, Definition, Instruments, merge_expositions

HTTP_REQUESTS = Definition(
    f"{PREFIX}http_requests_total",
    "counter",
    "HTTP requests answered, by route and status; 499: the client went before there was a status.",
    ("path", "status"),
)
GRPC_REQUESTS = Definition(
    f"{PREFIX}grpc_requests_total",
    "counter",
    "gRPC calls ended, by method and status code; CANCELLED: the client went.",
    ("method", "code"),
)
SCRAPE_FAILURES = Definition(
    f"{PREFIX}worker_scrape_failures_total",
    "counter",
    "Workers whose series were missing from an answer to a scrape, since they did not answer in time.",
)
PLACEMENTS = Definition(
    f"{PREFIX}placements_total",
    "counter",
    "Requests placed, by the directory's reason; none: no directory answered in time, placed by load; "
    "other: it gave a reason that is none.",
    ("reason",),
)
LOSSES = Definition(
    f"{PREFIX}worker_losses_total",
    "counter",
    "Times that a request lost its worker; it then went on at another one, or was given up.",
    ("outcome",),
)
REFUSALS = Definition(
    f"{PREFIX}requests_refused_total",
    "counter",
    "Generations refused that could be served at another time, by reason.",
    ("reason",),
)
DEFINITIONS = (HTTP_REQUESTS, GRPC_REQUESTS, SCRAPE_FAILURES, PLACEMENTS, LOSSES, REFUSALS)


class IngressMetrics:
    """Written and exposed on the event loop of its process."""

    def __init__(self, *, ingress: str) -> None:
        """`ingress` is the label that tells this process's series from others'."""
        instruments = Instruments({"ingress": ingress})
        self._http_requests = instruments.value(HTTP_REQUESTS)
        self._grpc_requests = instruments.value(GRPC_REQUESTS)
        self._scrape_failures = instruments.value(SCRAPE_FAILURES)
        self._placements = instruments.value(PLACEMENTS)
        self._losses = instruments.value(LOSSES, known=[("resumed",), ("given_up",)])
        self._refusals = instruments.value(REFUSALS, known=[(reason,) for reason in REASONS])
        self._instruments = instruments

    def request_ends(self, path: str, status: int) -> None:
        """`path` is the route's, never what a client made up."""
        self._http_requests.add(labels=(path, str(status)))

    def grpc_call_ends(self, method: str, code: str) -> None:
        """`code` is the status code's name."""
        self._grpc_requests.add(labels=(method, code))

    def refused(self, reason: str) -> None:
        """A generation was refused; `reason` is one of `refusals.REASONS`."""
        self._refusals.add(labels=(reason,))

    def placed(self, reason: str) -> None:
        """A request was placed."""
        self._placements.add(labels=(reason,))

    def worker_lost(self, *, is_resumed: bool) -> None:
        """A request lost its worker."""
        self._losses.add(labels=("resumed" if is_resumed else "given_up",))

    def exposition(self, workers: Sequence[str | None]) -> str:
        """All series, with each worker's exposition or None where there is none."""
        answers = [text for text in workers if text is not None]
        self._scrape_failures.add(len(workers) - len(answers))
        return merge_expositions([self._instruments.exposition(), *answers])
