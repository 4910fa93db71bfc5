"""FLOP per token of training a transformer: the numerator of MFU and HFU.

A multiplication and an addition count as two. Vector work (norms, softmax, activations) is left out, as in every source
below. Only matrices that a token passes through count: a table that is looked up costs nothing, an unembedding does.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Recomputation = Literal["none", "attention", "full"]


class TransformerShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a decoder. `num_kv_heads` = `num_heads` without grouped queries; `is_gated` = three FFN matrices."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_size: int
    vocab_size: int
    sequence_length: int
    is_gated: bool = False

    @property
    def matmul_parameters(self) -> int:
        """Parameters that multiply each token: projections, feed-forward and unembedding; no biases, no norms."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        attention = self.hidden_size * self.head_size * heads
        ffn = (3 if self.is_gated else 2) * self.hidden_size * self.ffn_size
        return self.num_layers * (attention + ffn) + self.hidden_size * self.vocab_size


def model_flop_per_token(shape: TransformerShape, *, causal_factor: float) -> float:
    """FLOP that the model needs per trained token, forward and backward: 6 P_matmul + 12 L a d s c.

    `causal_factor` c: 1.0 counts the whole square of scores (PaLM, Megatron-LM), 0.5 the half below the diagonal.
    Source: Chowdhery et al., PaLM (arXiv 2204.02311), appendix B; P is restricted to matmuls, L = layers, a = heads,
    d = head size, s = sequence length.
    """
    return 6.0 * shape.matmul_parameters + 3.0 * _attention_forward_flop(shape, causal_factor=causal_factor)


def hardware_flop_per_token(shape: TransformerShape, *, causal_factor: float, recomputation: Recomputation) -> float:
    """FLOP that are executed per trained token: the model's, and what is computed a second time in the backward pass.

    "full" repeats the forward pass of every layer (not of the unembedding), "attention" the scores and their product
    with the values alone. Source: Narayanan et al., SC'21 (arXiv 2104.04473), section 5.1 and appendix: 96 B s l h^2
    (1 + s/6h + V/16lh) with full recomputation; Korthikanti et al. (arXiv 2205.05198) for the selective kind.
    """
    model_flop = model_flop_per_token(shape, causal_factor=causal_factor)
    attention_flop = _attention_forward_flop(shape, causal_factor=causal_factor)
    match recomputation:
        case "none":
            return model_flop
        case "attention":
            return model_flop + attention_flop
        case "full":
            in_layers = shape.matmul_parameters - shape.hidden_size * shape.vocab_size
            return model_flop + 2.0 * in_layers + attention_flop


def _attention_forward_flop(shape: TransformerShape, *, causal_factor: float) -> float:
    # Two products (scores, and scores with values) of 2 FLOP for each of s keys and a*d channels.
    return 4.0 * shape.num_layers * shape.num_heads * shape.head_size * shape.sequence_length * causal_factor
