"""How long a step takes, as this worker's own steps have shown. Standard library only.

    step_s = base + a * (prompt tokens) + b * (prompt tokens * tokens before them) + d * (sequences that decode)

None of the four can be negative. Fitted by least squares in which older steps count less and less.
"""

from dataclasses import dataclass

_MEMORY = 0.995
"""What a step still counts for after the next one: 200 steps are remembered."""
_SCALES = (1.0, 100.0, 100_000.0, 1.0)
"""Of the features, so that all coefficients are of one size."""
_ORDER = (1, 0, 2, 3)
"""In which features are given what they explain. Of the first steps each could explain all; of a prompt, its tokens are
the best guess."""
_NUM_SWEEPS = 30


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes."""

    num_prefill_tokens: int
    num_pairs: float
    """Of prompt tokens and tokens that each of them attends to."""
    num_decodes: int


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The coefficients, seconds; 0 of what was never seen."""

    base_s: float = 0.0
    per_prefill_token_s: float = 0.0
    per_pair_s: float = 0.0
    per_decode_s: float = 0.0


class StepCostModel:
    """Takes steps as they happen. Not thread-safe."""

    def __init__(self) -> None:
        size = len(_SCALES)
        self._products = [[0.0] * size for _ in range(size)]
        self._targets = [0.0] * size
        self._solution = [0.0] * size

    def observe(self, shape: StepShape, duration_s: float) -> None:
        """A step of this shape took so long."""
        counts = (1.0, shape.num_prefill_tokens, shape.num_pairs, shape.num_decodes)
        features = [count / scale for count, scale in zip(counts, _SCALES, strict=True)]
        for row, feature in enumerate(features):
            products = self._products[row]
            for column, other in enumerate(features):
                products[column] = _MEMORY * products[column] + feature * other
            self._targets[row] = _MEMORY * self._targets[row] + feature * duration_s

    def costs(self) -> StepCosts:
        """What fits best: coordinate descent from the last solution, each coordinate kept at 0 or above."""
        solution = self._solution
        for _ in range(_NUM_SWEEPS):
            for row in _ORDER:
                products = self._products[row]
                if products[row] > 0:
                    rest = sum(value * solution[column] for column, value in enumerate(products) if column != row)
                    solution[row] = max(0.0, (self._targets[row] - rest) / products[row])
        return StepCosts(*(value / scale for value, scale in zip(solution, _SCALES, strict=True)))
