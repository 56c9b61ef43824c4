"""An ingress's side of placement: what it asks, and what it does without an answer."""

from typing import Any

import pytest

from pagoda.cluster.ingress.directory_api import DirectoryUnavailableError
from pagoda.cluster.placer import Placer
from pagoda.proto import directory_pb2 as pb
from pagoda.worker.block_hash import HashDomain, hash_blocks
from pagoda.worker.types import Request, RequestId, SamplingParams

DOMAIN = HashDomain(b"weights", "", "float32", "", 4)


class Client:
    """A directory's client that answers as the test says."""

    def __init__(self, ranked: tuple[str, ...] | None = ("b", "a")) -> None:
        self.ranked = ranked
        self.reason = "prefix"
        self.queries: list[Any] = []
        self.excluded: list[Any] = []

    async def place(self, query: Any, *, exclude: Any) -> pb.PlaceResponse | None:
        self.queries.append(query)
        self.excluded.append(set(exclude))
        return None if self.ranked is None else pb.PlaceResponse(ranked=self.ranked, reason=self.reason)

    async def lookup(self, model: str, hashes: Any) -> pb.LookupResponse | None:
        assert model == "m"
        held = pb.HeldPrefix(worker_id="a", num_blocks=len(hashes), num_device_blocks=1, num_predicted_blocks=2)
        return None if self.ranked is None else pb.LookupResponse(workers=[held])

    async def stats(self) -> pb.DirectoryStats | None:
        return None if self.ranked is None else pb.DirectoryStats(num_entries=3)


def request(num_tokens: int = 10, salt: bytes = b"", num_public_tokens: int = 0, **sampling: Any) -> Request:
    return Request(
        RequestId("r"),
        tuple(range(num_tokens)),
        SamplingParams(**sampling),
        salt=salt,
        num_public_tokens=num_public_tokens,
    )


async def test_hashes_as_the_worker_does() -> None:
    """With the request's salt; of full blocks."""
    client, reasons = Client(), []
    placer = Placer(client, "m", lambda: DOMAIN, on_placed=reasons.append)  # type: ignore[arg-type]
    assert await placer.rank(request(n=3, max_tokens=7), exclude={"c"}) == ("b", "a")
    (query,) = client.queries
    assert list(query.hashes) == hash_blocks(DOMAIN.root(), range(10), 4)
    assert (query.request_id, query.model, query.num_tokens) == ("r", "m", 10)
    assert (query.num_samples, query.max_output_tokens) == (3, 7)
    assert client.excluded == [{"c"}]
    await placer.rank(request(salt=b"tenant"))
    assert not set(client.queries[1].hashes) & set(query.hashes)
    assert reasons == ["prefix", "prefix"]


async def test_asks_for_public_blocks_as_the_worker_names_them() -> None:
    client = Client()
    placer = Placer(client, "m", lambda: DOMAIN)  # type: ignore[arg-type]
    await placer.rank(request(salt=b"tenant", num_public_tokens=5))
    assert list(client.queries[0].hashes) == DOMAIN.chain(b"tenant", num_public_tokens=5).blocks(range(10), 4)
    assert client.queries[0].hashes[:1] == hash_blocks(DOMAIN.root(), range(4), 4)


async def test_a_directory_that_lies_costs_hits_only() -> None:
    """Workers that nobody knows are for the router to ignore; a reason of its own makes no series of metrics."""
    reasons: list[str] = []
    client = Client(ranked=("nobody",) * 1000)
    client.reason = "a reason of its own"
    placer = Placer(client, "m", lambda: DOMAIN, on_placed=reasons.append, is_routable={"a"}.__contains__)  # type: ignore[arg-type]
    await placer.rank(request())
    assert client.excluded == [set(), {"nobody"}]
    client.ranked = ()
    assert await placer.rank(request()) == ()
    assert reasons == ["other", "other"]


async def test_long_prompts_are_hashed_alike() -> None:
    client = Client()
    await Placer(client, "m", lambda: DOMAIN).rank(request(9000))  # type: ignore[arg-type]
    assert list(client.queries[0].hashes) == hash_blocks(DOMAIN.root(), range(9000), 4)


async def test_what_takes_no_hits_is_placed_by_load() -> None:
    client = Client()
    await Placer(client, "m", lambda: DOMAIN).rank(request(prompt_logprobs=0))  # type: ignore[arg-type]
    assert list(client.queries[0].hashes) == []


async def test_workers_that_leave_are_not_asked_for() -> None:
    """Their load would be reserved where the request cannot go."""
    client = Client(ranked=("b", "a"))
    placer = Placer(client, "m", lambda: DOMAIN, is_routable=lambda name: name != "b")  # type: ignore[arg-type]
    await placer.rank(request(), exclude={"c"})
    assert client.excluded == [{"c"}, {"c", "b"}]


async def test_without_an_answer() -> None:
    """Nor before a worker is known."""
    client, reasons = Client(ranked=None), []
    placer = Placer(client, "m", lambda: DOMAIN, on_placed=reasons.append)  # type: ignore[arg-type]
    assert await placer.rank(request()) == ()
    assert reasons == ["none"]
    for question in (placer.stats(), placer.holders([1, 2, 3])):
        with pytest.raises(DirectoryUnavailableError):
            await question
    early = Placer(Client(), "m", lambda: None)  # type: ignore[arg-type]
    assert await early.rank(request()) == ()
    with pytest.raises(DirectoryUnavailableError):
        await early.holders([1, 2, 3])


async def test_what_people_are_told() -> None:
    placer = Placer(Client(), "m", lambda: DOMAIN)  # type: ignore[arg-type]
    assert await placer.holders(list(range(12))) == [
        {"worker_id": "a", "num_tokens": 12, "num_device_tokens": 4, "num_predicted_tokens": 8}
    ]
    assert (await placer.stats())["num_entries"] == "3"


def test_a_domain_survives_its_text() -> None:
    domain = HashDomain(b"\x00\xff", "int8", "bfloat16", "{}", 16, adapter_digest=b"a", salt=b"s")
    assert HashDomain.from_text(domain.as_text()) == domain
