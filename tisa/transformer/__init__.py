"""A transformer in which any position method can be put by name.

config.py          what a transformer is made of
before.py          configs that were saved before a default changed
cache.py           keys and values of the tokens so far
forward_pass.py    where the tokens of a pass stand and what they may see; packed batches
sinks.py           a logit in the softmax's denominator that no token has
attention.py       attention with every hook of a position method
self_attention.py  the drop-in module for a transformer of your own
model.py           embeddings, blocks (pre-norm or post-norm), hidden states out: encoder or decoder
language_model.py  with a tied head: masked or causal language model
saving.py          safetensors and a config file
"""

from tisa.transformer.cache import Cache
from tisa.transformer.config import TransformerConfig
from tisa.transformer.language_model import LanguageModel
from tisa.transformer.model import Transformer
from tisa.transformer.saving import load, save
from tisa.transformer.self_attention import SelfAttention

__all__ = [
    "Cache",
    "LanguageModel",
    "SelfAttention",
    "Transformer",
    "TransformerConfig",
    "load",
    "save",
]
