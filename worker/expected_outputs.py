"""How long outputs are likely to be, from those of the same tenant that have ended. Standard library only."""

_WEIGHT = 0.1
"""Of the last output in the mean."""
_FIRST_GUESS = 128.0
"""Tokens, before any output has ended."""
_MAX_TENANTS = 4096


class ExpectedOutputs:
    """Means that follow what they see. One owner."""

    def __init__(self) -> None:
        self._of_all = 0.0
        self._of_tenants: dict[str, float] = {}

    def tokens(self, tenant: str, max_tokens: int) -> float:
        """Of a sequence that has just come; at least one."""
        mean = self._of_tenants.get(tenant) or self._of_all or _FIRST_GUESS
        return min(float(max_tokens), max(1.0, mean))

    def ended(self, tenant: str, num_tokens: int) -> None:
        """A sequence has ended with so many tokens; one that got none says nothing."""
        if num_tokens == 0:
            return
        self._of_all = _mixed(self._of_all, num_tokens)
        if tenant not in self._of_tenants and len(self._of_tenants) >= _MAX_TENANTS:
            self._of_tenants.clear()
        self._of_tenants[tenant] = _mixed(self._of_tenants.get(tenant, 0.0), num_tokens)


def _mixed(mean: float, value: float) -> float:
    return value if mean == 0 else (1 - _WEIGHT) * mean + _WEIGHT * value
