"""Sinusoidal position embeddings (Vaswani et al., NeurIPS 2017)."""

import math

import torch

from tisa.positions.angles import angles_of
from tisa.positions.base import Places, Position, PositionConfig, Prepared
from tisa.shapes import Embeddings, Float, Tensor


class Sinusoidal(Position):
    """Fixed waves added to the input: PE(p, 2i) = sin(p/10000^(2i/d)), PE(p, 2i+1) = cos(·).

    No parameters; d is the width of the input embeddings; any length. The waves are of size 1, and
    drown token embeddings that begin at N(0, 0.02): `scale` is a factor before them, 0.028 to begin
    alike. (The original multiplies its token embeddings by √d instead.)
    """

    def __init__(self, config: PositionConfig, *, scale: float = 1.0) -> None:
        super().__init__(config)
        if not 0 < scale < math.inf:
            raise ValueError(f"Sinusoidal: scale must be above 0, got {scale}")
        self.scale = scale

    def shared(self, places: Places) -> Float[Tensor, "tokens width"]:
        """Return the embedding of every position, float64 inside."""
        width = self.config.embedding_width
        angles = angles_of(places.positions, width)
        waves = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)[:, :width]
        return waves * self.scale

    def embed(self, embeddings: Embeddings, prepared: Prepared) -> Embeddings:
        """Return embeddings + PE."""
        return embeddings + prepared.shared.to(embeddings.dtype)
