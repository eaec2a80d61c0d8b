"""Layers and models of a method with random parameters, in float64."""

import torch
from torch import nn

from tisa.transformer import SelfAttention, Transformer, TransformerConfig
from tisa_lab.criteria.settings import Settings


def draw_parameters(module: nn.Module, seed: int) -> None:
    """Draw every parameter anew: N(0, 1/√width) for matrices and tables, N(0, 1) for vectors.

    A layer of such numbers keeps the size of its input, so that neither content nor positions
    drown in each other. Initial values of a method would not do: some of them are 0.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            deviation = p.shape[-1] ** -0.5 if p.ndim > 1 else 1.0
            drawn = torch.randn(p.shape, generator=generator, dtype=torch.float64) * deviation
            p.copy_(drawn.to(p.dtype))


def random_layer(name: str, settings: Settings, seed: int) -> SelfAttention:
    """Return an attention layer with that method and random parameters."""
    layer = SelfAttention(
        settings.hidden_size,
        settings.num_attention_heads,
        position=name,
        max_position_embeddings=settings.training_length,
    )
    layer.double()
    draw_parameters(layer, settings.seed + seed)
    return layer.to(settings.device).eval()


def random_transformer(name: str, settings: Settings, seed: int) -> Transformer:
    """Return a transformer of two layers with that method and random parameters."""
    model = Transformer(
        TransformerConfig(
            vocab_size=32,
            hidden_size=settings.hidden_size,
            num_hidden_layers=2,
            num_attention_heads=settings.num_attention_heads,
            max_position_embeddings=settings.training_length,
            position=name,
        )
    )
    model.double()
    draw_parameters(model, settings.seed + seed)
    return model.to(settings.device).eval()


def random_content(settings: Settings, *shape: int, seed: int) -> torch.Tensor:
    """Return content vectors ~ N(0, 1), (*shape, hidden)."""
    generator = torch.Generator().manual_seed(settings.seed + seed)
    drawn = torch.randn(*shape, settings.hidden_size, generator=generator, dtype=torch.float64)
    return drawn.to(settings.device)
