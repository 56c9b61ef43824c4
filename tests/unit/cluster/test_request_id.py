"""Every request has an id, and every answer says it, also the answers to errors."""

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagoda.cluster.ingress.request_id import HEADER, RequestIds, request_id_headers, request_id_of


def app(*, adds_header: bool = True) -> FastAPI:
    made = FastAPI()
    made.add_middleware(RequestIds, adds_header=adds_header)

    @made.get("/")
    async def answer(http: Request) -> str:
        return request_id_of(http)

    @made.get("/broken")
    async def fail() -> None:
        raise RuntimeError("broken")

    @made.exception_handler(Exception)
    async def on_error(http: Request, _: Exception) -> Response:
        return JSONResponse(None, 500, headers=request_id_headers(http))

    return made


async def get(path: str = "/", request_id: str | None = None, *, adds_header: bool = True) -> httpx.Response:
    transport = httpx.ASGITransport(app(adds_header=adds_header), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.get(path, headers={} if request_id is None else {HEADER: request_id})


@pytest.mark.parametrize("request_id", ["1", "x" * 128, "a-b/c:d_e~!"])
async def test_valid_id_is_taken(request_id: str) -> None:
    answer = await get(request_id=request_id)
    assert answer.json() == request_id
    assert answer.headers.get_list(HEADER) == [request_id]


@pytest.mark.parametrize("request_id", ["", "x" * 129, "a b", "a\tb", "a\x7f"])
@pytest.mark.parametrize("adds_header", [True, False])
async def test_other_ids_are_refused(request_id: str, adds_header: bool) -> None:
    """Too long, with a space or a control character. The answer has an id of its own."""
    answer = await get(request_id=request_id, adds_header=adds_header)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == HEADER
    assert len(answer.headers.get_list(HEADER)) == adds_header
    assert answer.headers.get(HEADER) != request_id


async def test_id_is_drawn() -> None:
    """Each time another."""
    answers = [await get() for _ in range(2)]
    drawn = [answer.headers[HEADER] for answer in answers]
    assert len(set(drawn)) == 2
    assert [answer.json() for answer in answers] == drawn


@pytest.mark.parametrize(("path", "status"), [("/nowhere", 404), ("/broken", 500)])
async def test_errors_say_it_too(path: str, status: int) -> None:
    """Once, also where the answer is made outside of all middleware."""
    answer = await get(path, "abc")
    assert answer.status_code == status
    assert answer.headers.get_list(HEADER) == ["abc"]


@pytest.mark.parametrize("path", ["/", "/broken"])
async def test_header_left_to_the_server(path: str) -> None:
    """A server that sends the header itself must not find it there already: it would be in the answer twice."""
    assert HEADER not in (await get(path, "abc", adds_header=False)).headers
