"""Ray and Ray Serve: deploys the workers and the ingress, and takes them down again.

Two applications: *workers* (the engines) and *front* (the HTTP ingress, which finds the workers by name), so that
either can be updated without redeploying the other.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve import RunTarget
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from pagoda.cluster.config import ClusterConfig
from pagoda.cluster.ingress.http import build_http_app
from pagoda.cluster.ingress.service import InferenceService
from pagoda.cluster.replica import Worker
from pagoda.worker.config import EngineLimits
from pagoda.worker.errors import EngineStoppedError, OverloadedError, PagodaError
from pagoda.worker.tokenizer import Tokenizer
from pagoda.worker.types import Request, SequenceOutput

WORKERS_APP = "workers"
FRONT_APP = "front"
_ANSWER_DEADLINE_S = 10.0
_HEALTH_PERIOD_S = 1.0
_POLL_S = 0.1
_LIVING = ("NOT_STARTED", "RUNNING", "DEPLOYING", "UNHEALTHY")


class ServiceFailedError(PagodaError):
    """The service did not come up, or went down and does not come back."""


class ServeWorkerClient:
    """Implements `WorkerClient` over a Ray Serve handle; Serve picks the least loaded of two random workers."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._streaming: Any = handle.options(stream=True)

    async def ping(self) -> None:
        await asyncio.wait_for(self._handle.ping.remote(), _ANSWER_DEADLINE_S)

    async def stream(self, request: Request) -> AsyncGenerator[list[SequenceOutput], None]:
        response = self._streaming.stream.remote(request)
        try:
            async for outputs in response:
                yield outputs
        except RayTaskError as error:
            raise error.cause from error  # its own text is a remote stack trace
        except BackPressureError as error:
            raise OverloadedError(str(error)) from error
        except RayError as error:
            raise EngineStoppedError("the worker is gone") from error
        finally:
            response.cancel()


def start_ray(config: ClusterConfig, *, address: str | None) -> None:
    """Join the Ray cluster at `address`, or start one on this machine that ends with this process."""
    if address is not None:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The worker actors reserve one CPU each, the ingress and Serve's own actors none.
    ray.init(
        num_cpus=max(config.num_workers, os.cpu_count() or 1),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


def deploy(config: ClusterConfig, limits: EngineLimits) -> None:
    """Start to bring the service up; `is_up` says when it answers. `limits` are those of the engine config."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    logging_config = LoggingConfig(log_level="WARNING", enable_access_log=False)
    serve.start(
        http_options=HTTPOptions(host=config.host, port=config.port, request_timeout_s=None),
        logging_config=logging_config,
    )
    serve.run_many(
        [
            RunTarget(_workers(config), name=WORKERS_APP, route_prefix=None, logging_config=logging_config),
            RunTarget(_front(config, limits), name=FRONT_APP, route_prefix="/", logging_config=logging_config),
        ],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


def is_up() -> bool:
    """Whether both applications serve. Serve mends what can be mended by itself.

    Raises `ServiceFailedError` once one of them has failed for good.
    """
    applications = serve.status().applications
    statuses = []
    for name in (WORKERS_APP, FRONT_APP):
        if (application := applications.get(name)) is None:
            raise ServiceFailedError(f"{name}: the application is gone")
        if application.status not in _LIVING:
            messages = [application.message, *(d.message for d in application.deployments.values())]
            reasons = " ".join(message.strip().splitlines()[-1] for message in messages if message.strip())
            raise ServiceFailedError(f"{name}: {application.status}: {reasons}; see the logs in /tmp/ray")
        statuses.append(application.status)
    return all(status == "RUNNING" for status in statuses)


def shut_down(*, stop_ray: bool) -> None:
    """Take the service down: running requests get their drain time, then everything of ours is gone.

    `stop_ray` says whether the Ray cluster is ours too; else only our applications go.
    """
    for name in (FRONT_APP, WORKERS_APP):  # what runs in the front needs the workers
        _delete(name)
    if stop_ray:
        serve.shutdown()  # type: ignore[no-untyped-call]
    ray.shutdown()


def _delete(application: str) -> None:
    if application not in serve.status().applications:
        return
    # Serve's own waiting ends after a minute, however long the drain time is.
    serve.delete(application, _blocking=False)
    while application in serve.status().applications:
        time.sleep(_POLL_S)


def _workers(config: ClusterConfig) -> Any:
    scheduler = config.engine.scheduler
    deployment = serve.deployment(
        num_replicas=config.num_workers,
        ray_actor_options={"num_cpus": 1, "num_gpus": 1 if config.engine.device.startswith("cuda") else 0},
        # Room for one more than the engine takes, so that the engine is what refuses.
        max_ongoing_requests=scheduler.max_num_seqs + scheduler.max_num_waiting + 1,
        max_queued_requests=scheduler.max_num_waiting,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_ANSWER_DEADLINE_S,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=config.drain_s,
        max_constructor_retry_count=1,
    )
    return deployment(Worker).bind(config.engine)


def _front(config: ClusterConfig, limits: EngineLimits) -> Any:
    def build() -> FastAPI:
        client = ServeWorkerClient(serve.get_deployment_handle("Worker", app_name=WORKERS_APP))
        service = InferenceService(Tokenizer(config.engine.model_path), client, limits)
        return build_http_app(service, model_name=config.served_model_name)

    deployment = serve.deployment(
        name="Front",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=config.max_http_requests,
        max_queued_requests=-1,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_ANSWER_DEADLINE_S,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=config.drain_s,
        max_constructor_retry_count=1,
    )
    return deployment(serve.ingress(build)(type("Front", (), {}))).bind()
