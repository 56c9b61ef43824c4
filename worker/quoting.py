"""What clients sent, as it may stand in errors and logs: never more of it than anybody reads."""

MAX_QUOTED = 100
"""Characters of a value that is quoted."""
MAX_MESSAGE = 500
"""Characters of an error's text. With gRPC it is a header, which is refused when it is too large."""


def shortened(text: str, max_length: int = MAX_MESSAGE) -> str:
    """The text, without its middle if it is longer: what is wrong mostly stands at one of the ends."""
    if len(text) <= max_length:
        return text
    num_first = max_length // 2
    return f"{text[:num_first]}…{text[num_first + 1 - max_length :]}"


def quoted(text: str) -> str:
    """In quotation marks, in one line."""
    return repr(shortened(text, MAX_QUOTED))
