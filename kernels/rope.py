"""Rotary position embedding: the frequencies of each variant, and the table of one step.

Dimensions: T tokens, D head size.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """`kind` default, linear (positions divided by `factor`) or llama3 (low frequencies divided by `factor`)."""

    theta: float
    """Base of the frequencies."""
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    """Context length before scaling, tokens."""


def inverse_frequencies(config: RopeConfig, head_size: int) -> torch.Tensor:
    """The D/2 angular frequencies, float32.

    Source: RoFormer (arXiv:2104.09864) eq. 15; linear: arXiv:2306.15595 eq. 4; llama3: the Llama 3.1 model card's
    reference, which keeps wavelengths below original/high, divides those above original/low and blends between.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    frequencies = 1.0 / config.theta**exponents
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        low, high = config.low_freq_factor, config.high_freq_factor
        blend = ((config.original_max_position / wavelengths - low) / (high - low)).clamp(0, 1)
        return (1 - blend) * frequencies / config.factor + blend * frequencies
    return frequencies


def cos_sin(positions_T: torch.Tensor, inverse_frequencies_D2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos_TD, sin_TD) in float32, both halves of D alike."""
    angles_TD = (positions_T[:, None].float() * inverse_frequencies_D2).repeat(1, 2)
    return angles_TD.cos(), angles_TD.sin()
