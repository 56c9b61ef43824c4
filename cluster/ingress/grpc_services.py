"""The gRPC services for Ray Serve to host. Requests that cannot be read come through, to be counted and answered."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from pagoda.proto.inference_pb2_grpc import add_InferenceServicer_to_server


@dataclass(frozen=True, slots=True)
class UnreadableRequest:
    """Takes the place of a message. gRPC itself would answer UNKNOWN, with the name of a Python class."""

    problem: str


def add_inference(servicer: Any, server: Any) -> None:
    """What Serve calls with a server of its own."""
    add_InferenceServicer_to_server(servicer, _TolerantServer(server))  # type: ignore[no-untyped-call]


def add_health(servicer: Any, server: Any) -> None:
    """The same for `grpc.health.v1`."""
    add_HealthServicer_to_server(servicer, _TolerantServer(server))


class _TolerantServer:
    """Stands between a server and what generated code adds to it."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The same ones come again by name."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        tolerant = {
            name: handler._replace(request_deserializer=_tolerant(handler.request_deserializer))
            for name, handler in handlers.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, tolerant),))
        self._server.add_registered_method_handlers(service, tolerant)


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return UnreadableRequest(str(error))

    return read
