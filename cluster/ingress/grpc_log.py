"""Counts every gRPC call and logs one line for it when it has ended, as `request_log.py` does for HTTP.

At level info, or at debug if it is a probe that comes every few seconds:

    Generate OK id=job-7-1f3c prompt=31 cached=16 output=40 ttft_ms=18.2 duration_ms=402.0 finish=stop
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from pagoda.cluster.ingress.grpc_errors import status_of
from pagoda.cluster.ingress.metrics import IngressMetrics
from pagoda.cluster.ingress.request_log import RequestRecord
from pagoda.worker.errors import InvalidRequestError, PagodaError
from pagoda.worker.tolerant_server import UnreadableRequest

logger = logging.getLogger(__name__)

PROBES = ("Check", "Watch")


class GrpcLog:
    """One for all calls of an ingress process."""

    def __init__(self, metrics: IngressMetrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock

    @contextmanager
    def call(self, method: str, request: Any) -> Iterator[RequestRecord]:
        """A call of `method`, which lasts as long as the block; how that ends is the call's status.

        Raises `InvalidRequestError` for a request that is none.
        """
        record = RequestRecord(self._clock)
        code = grpc.StatusCode.OK
        try:
            if isinstance(request, UnreadableRequest):
                raise InvalidRequestError("request", request.problem)
            yield record
        except PagodaError as error:
            code = status_of(error).code
            raise
        except (asyncio.CancelledError, GeneratorExit):  # the client went
            code = grpc.StatusCode.CANCELLED
            raise
        except BaseException:
            code = grpc.StatusCode.INTERNAL  # what Ray Serve answers to an error that nobody foresaw
            raise
        finally:
            self._metrics.grpc_call_ends(method, code.name)
            level = logging.DEBUG if method in PROBES else logging.INFO
            if logger.isEnabledFor(level):
                logger.log(level, "%s", record.line(f"{method} {code.name}"))
