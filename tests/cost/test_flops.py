from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dougong.cost.flops import TransformerShape, hardware_flop_per_token, model_flop_per_token

SHAPES = st.builds(
    TransformerShape,
    num_layers=st.integers(1, 200),
    hidden_size=st.integers(1, 20_000),
    num_heads=st.integers(1, 128),
    num_kv_heads=st.integers(1, 128),
    head_size=st.integers(1, 256),
    ffn_size=st.integers(1, 80_000),
    vocab_size=st.integers(1, 300_000),
    sequence_length=st.integers(1, 200_000),
    is_gated=st.booleans(),
)


@given(SHAPES, st.sampled_from([0.5, 1.0]))
def test_recomputation_only_adds_and_at_most_a_third(shape: TransformerShape, causal_factor: float) -> None:
    model = model_flop_per_token(shape, causal_factor=causal_factor)
    none, attention, full = (
        hardware_flop_per_token(shape, causal_factor=causal_factor, recomputation=kind)
        for kind in ("none", "attention", "full")
    )
    assert model == none <= attention <= full
    assert full <= model * 4 / 3 * (1 + 1e-12)


@given(SHAPES)
def test_counting_half_the_scores_halves_the_attention_term(shape: TransformerShape) -> None:
    without = 6.0 * shape.matmul_parameters
    whole = model_flop_per_token(shape, causal_factor=1.0) - without
    half = model_flop_per_token(shape, causal_factor=0.5) - without
    assert half * 2 == pytest.approx(whole, rel=1e-6)


def test_full_recomputation_is_the_closed_form_of_megatron_lm() -> None:
    layers, hidden, vocab, length = 96, 12288, 51200, 2048
    shape = TransformerShape(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=96,
        num_kv_heads=96,
        head_size=128,
        ffn_size=4 * hidden,
        vocab_size=vocab,
        sequence_length=length,
    )
    closed_form = 96 * layers * hidden**2 * (1 + length / (6 * hidden) + vocab / (16 * layers * hidden))
    assert hardware_flop_per_token(shape, causal_factor=1.0, recomputation="full") == pytest.approx(closed_form)


def test_grouped_queries_share_their_keys_and_values() -> None:
    # Llama 3 8B: 8.03e9 parameters, of which 0.525e9 are the embedding table that is only looked up.
    shape = TransformerShape(
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        ffn_size=14336,
        vocab_size=128256,
        sequence_length=8192,
        is_gated=True,
    )
    assert shape.matmul_parameters + 4096 * 128256 == pytest.approx(8.03e9, rel=1e-3)
