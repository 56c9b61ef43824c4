"""The gRPC services for Ray Serve to host."""

from typing import Any

from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from pagoda.proto.inference_pb2_grpc import add_InferenceServicer_to_server
from pagoda.worker.tolerant_server import TolerantServer


def add_inference(servicer: Any, server: Any) -> None:
    """What Serve calls with a server of its own."""
    add_InferenceServicer_to_server(servicer, TolerantServer(server))  # type: ignore[no-untyped-call]


def add_health(servicer: Any, server: Any) -> None:
    """The same for `grpc.health.v1`."""
    add_HealthServicer_to_server(servicer, TolerantServer(server))
