"""Translation-invariant self-attention: how transformers know where a token stands.

    scoring = tisa.TISA(num_attention_heads=12)
    output = tisa.attention(query, key, value, scoring)

`scoring` has the functions of the offset, `ops` the operator and its backends, `offsets` the
convention that both follow; `positions` every method by name, `transformer` a transformer for them.
`tisa.hf` and `tisa.analysis` need more packages than torch: they are loaded when first used.
"""

import warnings
from importlib import import_module
from types import ModuleType

# Torch warns while it is imported where NumPy is not installed. Nothing here needs NumPy.
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    import torch as _torch  # noqa: F401

from tisa.ops import attention
from tisa.positions import Position, build_position, register
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
from tisa.transformer import LanguageModel, SelfAttention, Transformer, TransformerConfig

__version__ = "0.1.0"

__all__ = [
    "TISA",
    "ALiBi",
    "KerpleLog",
    "KerplePower",
    "LanguageModel",
    "NearFar",
    "Position",
    "ScoringFunction",
    "SelfAttention",
    "T5Buckets",
    "TISAv2",
    "Transformer",
    "TransformerConfig",
    "attention",
    "build_position",
    "register",
]

_ON_FIRST_USE = ("analysis", "hf")


def __getattr__(name: str) -> ModuleType:
    if name in _ON_FIRST_USE:
        return import_module(f"tisa.{name}")
    raise AttributeError(f"module 'tisa' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_FIRST_USE})
