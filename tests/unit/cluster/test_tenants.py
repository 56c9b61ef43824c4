"""What sets tenants apart: salts, and the ids of their requests."""

import itertools
from dataclasses import replace

import pytest

from pagoda.cluster.public_prefixes import PublicPrefixes, num_common
from pagoda.cluster.tenants import ANONYMOUS, MAX_CLIENT_SALT, Tenant
from pagoda.worker.block_hash import hash_of_parts
from pagoda.worker.errors import InvalidRequestError

A = Tenant("a", secret=b"secret of a, which is long enough")
B = Tenant("b", secret=b"secret of b, which is long enough")


def test_salts_differ_by_tenant_and_by_what_the_client_says() -> None:
    salts = [tenant.salt(client) for tenant in (A, B, ANONYMOUS) for client in (None, "x", "y")]
    assert len(set(salts)) == 9
    assert A.salt("x") == A.salt("x") == hash_of_parts(A.secret, b"x")
    assert ANONYMOUS.salt("x") == hash_of_parts(b"x")


def test_without_tenants_and_salts_all_share() -> None:
    assert ANONYMOUS.salt(None) == ANONYMOUS.salt("") == b""


def test_the_seam_between_secret_and_client_salt_cannot_be_moved() -> None:
    """A secret that is the beginning of another one, and a client who knows or guesses the rest."""
    short, long = Tenant("s", secret=b"k" * 32), Tenant("l", secret=b"k" * 32 + b"tail")
    assert short.salt("tail" + "x") != long.salt("x")
    encoded = hash_of_parts  # also with the length prefixes themselves in what the client says
    assert short.salt("\4\0\0\0tail") != encoded(b"k" * 32, b"tail")
    assert len({Tenant("t", secret=b"kkx"[:n]).salt("kkx"[n:]) for n in range(1, 4)}) == 3


def test_a_name_is_no_secret() -> None:
    """Tenants are told apart by what only they and the operator know."""
    assert replace(A, name="b").salt("x") == A.salt("x")


def test_client_salts_are_bounded() -> None:
    A.salt("é" * MAX_CLIENT_SALT)
    with pytest.raises(InvalidRequestError, match="cache_salt: may have 256 characters, not 257"):
        A.salt("x" * (MAX_CLIENT_SALT + 1))
    assert A.salt("\ud800") != A.salt("?")


@pytest.mark.parametrize("given", [None, "job", "a-b", "", "ü-\U0001f600"])
def test_only_its_own_requests_can_be_ended(given: str | None) -> None:
    request_id = A.new_request_id(given)
    assert request_id.startswith(given or "")
    assert A.may_end(request_id)
    assert not B.may_end(request_id)
    assert replace(B, is_operator=True).may_end(request_id)
    assert not A.may_end(request_id[:-1])
    assert not A.may_end("x" + request_id)
    assert not A.may_end("")
    assert A.new_request_id(given) != request_id


def test_an_id_that_looks_like_anothers_is_not_ones_own() -> None:
    """B asks for the id of a request of A's as its own: what comes of it ends with B's mark, and is another."""
    of_a = A.new_request_id("job")
    of_b = B.new_request_id(of_a)
    assert not A.may_end(of_b)
    assert not B.may_end(of_a)


def test_public_tokens_are_those_in_common_with_a_prefix() -> None:
    prefixes = PublicPrefixes([[1, 2, 3], [1, 2, 4, 5], [7]])
    cases = {(1, 2, 3, 9): 3, (1, 2, 3): 3, (1, 2): 2, (1, 2, 4, 6): 3, (1, 2, 9): 2, (7, 7): 1, (8,): 0, (0,): 0}
    assert {prompt: prefixes.num_public_tokens(prompt) for prompt in cases} == cases
    assert PublicPrefixes().num_public_tokens((1, 2)) == 0


def test_the_longest_common_beginning_is_found_among_any_prefixes() -> None:
    words = [word for n in range(4) for word in itertools.product((0, 1), repeat=n)]
    for chosen in itertools.combinations(words, 3):
        prefixes = PublicPrefixes(chosen)
        for prompt in words:
            expected = max(
                sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], zip(prompt, word, strict=False)))
                for word in chosen
            )
            assert prefixes.num_public_tokens(prompt) == expected


def test_common_beginnings_of_any_length() -> None:
    for length in range(40):
        one = tuple(range(length))
        for cut in range(length):
            assert num_common(one, (*one[:cut], -1, *one[cut + 1 :])) == cut
        assert num_common(one, (*one, 5)) == length
