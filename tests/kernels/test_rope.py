"""Rotary embedding against transformers' own.

Dimensions: T tokens, H heads, D head size.
"""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from pagoda.kernels.reference import rotate
from pagoda.kernels.rope import RopeConfig, cos_sin, inverse_frequencies

VARIANTS: dict[str, tuple[RopeConfig, dict[str, Any]]] = {
    "default": (RopeConfig(theta=10000.0), {"rope_type": "default", "rope_theta": 10000.0}),
    "default, long": (RopeConfig(theta=1e6), {"rope_type": "default", "rope_theta": 1e6}),
    "linear": (
        RopeConfig(theta=10000.0, kind="linear", factor=4.0),
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    ),
    "llama3": (
        RopeConfig(
            theta=500000.0,
            kind="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position=8192,
        ),
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
}
POSITIONS_T = torch.tensor([0, 1, 2, 15, 16, 17, 1000, 8191, 8192, 131071])


def transformers_rope(parameters: dict[str, Any], head_size: int) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=2 * head_size,
        num_attention_heads=2,
        head_dim=head_size,
        max_position_embeddings=131072,
        rope_parameters=dict(parameters),
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("head_size", [16, 64, 80, 128])
@pytest.mark.parametrize(("config", "parameters"), VARIANTS.values(), ids=VARIANTS)
def test_frequencies_equal_transformers(config: RopeConfig, parameters: dict[str, Any], head_size: int) -> None:
    """Two roundings of float32 apart: the same formula, with factors that may be grouped otherwise."""
    expected = transformers_rope(parameters, head_size).inv_freq
    torch.testing.assert_close(inverse_frequencies(config, head_size), expected, rtol=2.5e-7, atol=0)


@pytest.mark.parametrize("head_size", [16, 64, 80, 128])
@pytest.mark.parametrize(("config", "parameters"), VARIANTS.values(), ids=VARIANTS)
def test_cos_and_sin_equal_transformers(config: RopeConfig, parameters: dict[str, Any], head_size: int) -> None:
    """An angle of up to 131,071 that is off by two roundings of float32, 2.5e-7 of itself, moves its sine by 0.03."""
    cos_TD, sin_TD = cos_sin(POSITIONS_T, inverse_frequencies(config, head_size))
    expected = transformers_rope(parameters, head_size)(torch.zeros(1, 1, dtype=torch.float32), POSITIONS_T[None])
    for actual_TD, expected_1TD in zip((cos_TD, sin_TD), expected, strict=True):
        error_T = (actual_TD - expected_1TD[0]).abs().amax(-1)
        assert (error_T <= 1e-6 + 2.5e-7 * POSITIONS_T).all()


def test_variants_differ() -> None:
    """Each kind of scaling does something: a test of equality that all variants pass alike would prove nothing."""
    configs = [RopeConfig(5e5), RopeConfig(5e5, "linear", 8.0), RopeConfig(5e5, "llama3", 8.0)]
    default, linear, llama3 = (inverse_frequencies(config, 128) for config in configs)
    assert torch.equal(linear, default / 8)
    assert torch.equal(llama3[0], default[0])
    assert torch.allclose(llama3[-1], default[-1] / 8)
    assert ((llama3 < default * 0.99) & (llama3 > default / 8 * 1.01)).any()


def test_rotate_equals_transformers() -> None:
    """The rotation pairs dimension i with i + D/2, for any number of heads."""
    generator = torch.Generator().manual_seed(0)
    q_THD, k_THD = (torch.randn(10, heads, 64, generator=generator) for heads in (9, 3))
    cos_TD, sin_TD = cos_sin(POSITIONS_T, inverse_frequencies(RopeConfig(theta=10000.0), 64))
    expected = apply_rotary_pos_emb(q_THD[None], k_THD[None], cos_TD[None], sin_TD[None], unsqueeze_dim=2)
    for x_THD, expected_1THD in zip((q_THD, k_THD), expected, strict=True):
        # The same products and sums, which a compiler may contract into one rounding: 6e-8 of terms of size 4.
        torch.testing.assert_close(rotate(x_THD, cos_TD, sin_TD), expected_1THD[0], rtol=0, atol=5e-7)
