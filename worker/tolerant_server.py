"""gRPC servers whose methods also hear of requests that cannot be read, and so can count them and say what is wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError


@dataclass(frozen=True, slots=True)
class UnreadableRequest:
    """Takes the place of a message. gRPC itself would answer UNKNOWN, with the name of a Python class."""

    problem: str


class TolerantServer:
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
