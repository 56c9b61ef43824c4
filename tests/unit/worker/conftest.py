"""An engine on a fake rank for each test that asks for one."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_client import Client


@pytest.fixture
def make_client() -> Iterator[Callable[..., Client]]:
    """Makes clients, and closes them after the test."""
    clients: list[Client] = []

    def make(**options: Any) -> Client:
        clients.append(Client(**options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(make_client: Callable[..., Client]) -> Client:
    return make_client()
