"""Log probabilities against plain Python.

Dimensions: T tokens, E hidden, V vocabulary.
"""

import math

import pytest
import torch

from pagoda.worker import logprobs as logprobs_module
from pagoda.worker.logprobs import prompt_logprobs, token_logprobs
from pagoda.worker.types import TokenLogprobs

LOGITS = [[1.0, 3.0, 2.0, -1.0], [0.0, 0.0, 0.0, 5.0]]


def log_softmax(logits: list[float]) -> list[float]:
    total = math.log(sum(math.exp(logit) for logit in logits))
    return [logit - total for logit in logits]


@pytest.mark.parametrize("num_top", [0, 1, 3, 4, 20])
def test_token_and_its_alternatives(num_top: int) -> None:
    """The most probable tokens, best first, however many the vocabulary has; the token itself may be among them."""
    for token in range(4):
        (entry,) = token_logprobs(torch.tensor(LOGITS[:1]), [token], [num_top])
        expected = log_softmax(LOGITS[0])
        assert (entry.token_id, entry.rank) == (token, [3, 1, 2, 4][token])
        assert entry.logprob == pytest.approx(expected[token], abs=1e-6)
        assert [token_id for token_id, _ in entry.top] == [1, 2, 0, 3][:num_top]
        assert [value for _, value in entry.top] == pytest.approx([expected[i] for i, _ in entry.top], abs=1e-6)


def test_rows_ask_for_different_numbers() -> None:
    first, second = token_logprobs(torch.tensor(LOGITS), [0, 3], [0, 2])
    assert (len(first.top), len(second.top)) == (0, 2)
    assert second.top[0] == (3, second.logprob)


def test_tied_tokens_share_the_best_rank() -> None:
    assert token_logprobs(torch.tensor(LOGITS[1:]), [2], [0])[0].rank == 2


def test_bfloat16_logits_are_summed_in_float32() -> None:
    """A thousand equal logits: the sum stops growing at 256 in bfloat16."""
    (entry,) = token_logprobs(torch.zeros(1, 1000, dtype=torch.bfloat16), [5], [0])
    assert entry.logprob == pytest.approx(-math.log(1000), abs=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 7])
def test_prompt_in_slices_is_the_prompt_at_once(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more logits at once than allowed, here three tokens' worth; one token's always fit."""
    generator = torch.Generator().manual_seed(0)
    hidden_TE, head_VE = torch.randn(num_tokens, 5, generator=generator), torch.randn(10, 5, generator=generator)
    sizes: list[int] = []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return hidden @ head_VE.T

    def run() -> list[TokenLogprobs]:
        return list(prompt_logprobs(hidden_TE, list(range(num_tokens)), 2, logits=logits, vocab_size=10))

    whole = run()
    for allowed, largest in ((35, 3), (1, 1)):
        sizes.clear()
        monkeypatch.setattr(logprobs_module, "SLICE_ELEMENTS", allowed)
        sliced = run()
        assert max(sizes) == min(largest, num_tokens)
        assert [entry.token_id for entry in sliced] == list(range(num_tokens))
        # Matrix products of other shapes may round otherwise.
        assert [entry.logprob for entry in sliced] == pytest.approx([entry.logprob for entry in whole], abs=1e-5)
