"""Translation-invariant self-attention: how transformers know where a token stands.

    scores = tisa.TISA(num_attention_heads=12)
    output = tisa.attention(query, key, value, scores(query.shape[-2]))

`scoring` has the functions of the offset, `attention` the operator and its backends, `offsets` the
convention that both follow; `positions` every method by name, `encoder` a transformer for them.
"""

from tisa.attention import attention
from tisa.encoder import LanguageModel, SelfAttention, Transformer, TransformerConfig
from tisa.positions import build_position
from tisa.scoring import (
    TISA,
    ALiBi,
    KerpleLog,
    KerplePower,
    NearFar,
    ScoringFunction,
    T5Buckets,
    TISAv2,
)

__version__ = "0.1.0"

__all__ = [
    "TISA",
    "ALiBi",
    "KerpleLog",
    "KerplePower",
    "LanguageModel",
    "NearFar",
    "ScoringFunction",
    "SelfAttention",
    "T5Buckets",
    "TISAv2",
    "Transformer",
    "TransformerConfig",
    "attention",
    "build_position",
]
