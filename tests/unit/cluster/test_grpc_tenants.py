"""Keys over gRPC: whose a call is, and what it may end."""

from collections.abc import AsyncGenerator
from typing import Any

import grpc
import pytest

from pagoda.cluster.ingress.grpc_api import GrpcApi
from pagoda.cluster.ingress.grpc_errors import status_of
from pagoda.cluster.ingress.grpc_log import GrpcLog
from pagoda.cluster.ingress.metrics import IngressMetrics
from pagoda.cluster.ingress.service import InferenceService
from pagoda.cluster.ingress.tenant_registry import UnauthenticatedError
from pagoda.cluster.tenants import Tenant
from pagoda.proto import inference_pb2 as pb
from pagoda.worker.config import EngineLimits
from pagoda.worker.errors import PagodaError
from pagoda.worker.types import Request, RequestId, SequenceOutput

TENANTS = {
    "Bearer a": Tenant("a", secret=b"a" * 32),
    "Bearer b": Tenant("b", secret=b"b" * 32),
    "Bearer root": Tenant("root", secret=b"r" * 32, is_operator=True),
}


class Client:
    """Workers that take everything and answer nothing."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.aborted: list[RequestId] = []

    async def stream(self, request: Request) -> AsyncGenerator[list[SequenceOutput], None]:
        self.requests.append(request)
        for _ in ():
            yield []

    def abort(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)


def authenticate(authorization: str | None) -> Tenant:
    if authorization not in TENANTS:
        raise UnauthenticatedError("no")
    return TENANTS[authorization]


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def api(client: Client) -> GrpcApi:
    tokenizer: Any = type("Tokenizer", (), {"text_decoder": lambda *_, **__: None})()
    service = InferenceService(tokenizer, client, EngineLimits(100, 100, 4, 4))  # type: ignore[arg-type]
    return GrpcApi(service, "m", GrpcLog(IngressMetrics(ingress="i")), authenticate)


def key_of(name: str) -> tuple[tuple[str, str], ...]:
    return (("user-agent", "x"), ("authorization", f"Bearer {name}"))


async def generate(api: GrpcApi, name: str, **fields: Any) -> None:
    request = pb.GenerateRequest(model="m", token_ids=pb.TokenIds(ids=[1, 2]), request_id="job", **fields)
    async for _ in api.generate(request, key_of(name)):
        pass


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer x"),), (*key_of("a"), *key_of("b"))])
async def test_calls_without_one_valid_key_are_refused(api: GrpcApi, client: Client, metadata: Any) -> None:
    """All of them; probes are another service."""
    calls = [
        anext(api.generate(pb.GenerateRequest(model="m"), metadata)),
        anext(api.chat(pb.ChatRequest(model="m"), metadata)),
        api.tokenize(pb.TokenizeRequest(model="m", text="a"), metadata),
        api.list_models(pb.ListModelsRequest(), metadata),
        api.abort(pb.AbortRequest(request_id="x"), metadata),
    ]
    for call in calls:
        with pytest.raises(PagodaError) as caught:
            await call
        assert status_of(caught.value).code is grpc.StatusCode.UNAUTHENTICATED
    assert not client.aborted


async def test_requests_carry_their_tenant_and_its_salt(api: GrpcApi, client: Client) -> None:
    await generate(api, "a")
    await generate(api, "a", cache_salt="x")
    await generate(api, "b")
    assert [request.tenant for request in client.requests] == ["a", "a", "b"]
    tenants = [TENANTS["Bearer a"].salt(""), TENANTS["Bearer a"].salt("x"), TENANTS["Bearer b"].salt("")]
    assert [request.salt for request in client.requests] == tenants


async def test_only_ones_own_requests_can_be_ended(api: GrpcApi, client: Client) -> None:
    """What is not one's own is ignored as an unknown id is, so that nobody learns that it runs."""
    await generate(api, "a")
    (request,) = client.requests
    for name in ("b", "a", "root"):
        await api.abort(pb.AbortRequest(request_id=request.request_id), key_of(name))
        assert len(client.aborted) == ("b", "a", "root").index(name)
    await api.abort(pb.AbortRequest(request_id="unknown"), key_of("a"))
    assert client.aborted == [request.request_id] * 2
