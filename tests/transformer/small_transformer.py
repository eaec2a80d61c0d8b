"""A transformer small enough for any test."""

import torch

from tisa.transformer import TransformerConfig

SMALL = {
    "vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
    "max_position_embeddings": 12,
}  # fmt: skip


def config_of(**values):
    return TransformerConfig(**{**SMALL, **values})


def tokens(*shape):
    return torch.randint(0, 13, shape)
