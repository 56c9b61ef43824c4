"""What the operator has declared public: beginnings of prompts whose cached blocks all tenants may share."""

from bisect import bisect
from collections.abc import Iterable, Sequence

from pagoda.cluster.tenants_file import PublicPrefix
from pagoda.worker.chat_options import ChatOptions
from pagoda.worker.errors import InvalidRequestError
from pagoda.worker.tokenizer import Tokenizer


class PublicPrefixes:
    """Token ids of what is public. Immutable."""

    def __init__(self, prefixes: Iterable[Sequence[int]] = ()) -> None:
        self._sorted = sorted({tuple(prefix) for prefix in prefixes})

    def num_public_tokens(self, prompt: tuple[int, ...]) -> int:
        """How many tokens a prompt has in common with one of the prefixes, from the first on.

        Also of a prefix that it leaves half-way: what lies inside is public. A prompt's text and the same text as a
        prefix may differ in their last token, where the prompt's goes on with a letter that the tokenizer merges.
        """
        position = bisect(self._sorted, prompt)
        return max(
            (num_common(prompt, prefix) for prefix in self._sorted[max(0, position - 1) : position + 1]), default=0
        )


def num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Tokens that both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # slices compare a hundred times as fast as a loop here would
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def tokenised(prefixes: Sequence[PublicPrefix], tokenizer: Tokenizer) -> PublicPrefixes:
    """As prompts are. Takes up to a second for each; raises `InvalidRequestError` naming the one that is none."""
    found = []
    for position, prefix in enumerate(prefixes):
        try:
            if isinstance(prefix, str):
                found.append(tokenizer.encode(prefix))
            else:
                found.append(tokenizer.encode_chat(prefix, ChatOptions(add_generation_prompt=False)))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"public_prefixes.{position}", error.message) from error
    return PublicPrefixes(found)
