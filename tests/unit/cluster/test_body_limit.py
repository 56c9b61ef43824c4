"""A body that does not come in time; what is too large is tried in the integration tests."""

import asyncio
import json

from starlette.types import Message, Receive, Scope, Send

from pagoda.cluster.ingress.body_limit import BodyLimit

SCOPE: Scope = {"type": "http", "headers": []}


async def read_all(_: Scope, receive: Receive, send: Send) -> None:
    """An application that answers when it has the body, and then waits for the client to leave."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await receive()
    await send({"type": "http.response.body", "body": b"done"})


async def run(messages: list[Message], *, leaves: bool) -> list[Message]:
    """What is sent to a client that sends these and then nothing, or leaves a little later than the deadline."""
    sent: list[Message] = []

    async def receive() -> Message:
        if messages:
            return messages.pop(0)
        if leaves:
            await asyncio.sleep(0.1)
            return {"type": "http.disconnect"}
        return await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        sent.append(message)

    await BodyLimit(read_all, max_bytes=100, deadline_s=0.02)(SCOPE, receive, send)
    return sent


async def test_half_a_body_is_not_waited_for() -> None:
    start, body = await run([{"type": "http.request", "body": b"{", "more_body": True}], leaves=False)
    assert start["status"] == 408
    assert json.loads(body["body"])["error"]["param"] == "body"


async def test_the_deadline_is_for_the_body_only() -> None:
    """The answer may take longer."""
    start, body = await run([{"type": "http.request", "body": b"{}", "more_body": False}], leaves=True)
    assert (start["status"], body["body"]) == (200, b"done")
