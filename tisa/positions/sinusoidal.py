"""Sinusoidal position embeddings (Vaswani et al., NeurIPS 2017)."""

import math

import torch

from tisa.positions.base import Places, Position, Prepared
from tisa.shapes import Float, Tensor


class Sinusoidal(Position):
    """Fixed waves added to the input: PE(p, 2i) = sin(p/10000^(2i/d)), PE(p, 2i+1) = cos(·).

    No parameters; d is the width of the input embeddings; any length.
    """

    def shared(self, places: Places) -> Float[Tensor, "tokens width"]:
        """Return the embedding of every position, float64 inside."""
        width = self.config.embedding_width
        pair = torch.arange(0, width, 2, device=places.positions.device, dtype=torch.float64)
        angles = places.positions.double().unsqueeze(-1) * torch.exp(
            pair * (-math.log(10000.0) / width)
        )
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)[:, :width]

    def embed(
        self, embeddings: Float[Tensor, "*batch tokens width"], prepared: Prepared
    ) -> Float[Tensor, "*batch tokens width"]:
        """Return embeddings + PE."""
        return embeddings + prepared.shared.to(embeddings.dtype)
