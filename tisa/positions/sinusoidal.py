"""Sinusoidal position embeddings (Vaswani et al., NeurIPS 2017)."""

import math

import torch
from torch.nn.functional import pad

from tisa.positions.angles import angles_of, rates_of
from tisa.positions.base import (
    Places,
    Position,
    PositionConfig,
    Prepared,
    Variant,
    check_variant,
)
from tisa.shapes import Embeddings, Float, Tensor


class Sinusoidal(Position):
    """Fixed waves added to the input: PE(p, 2i) = sin(p/10000^(2i/d)), PE(p, 2i+1) = cos(·).

    No parameters; d is the width of the input embeddings; any length. The waves are of size 1, and
    drown token embeddings that begin at N(0, 0.02): `scale` is a factor before them, 0.028 to begin
    alike. (The original multiplies its token embeddings by √d instead.)

    `variant="author"` is tensor2tensor's: all sines before all cosines, and rates from 1 to
    1/10000 with both ends, so i/(d/2 − 1) in the place of 2i/d.
    """

    def __init__(
        self, config: PositionConfig, *, scale: float = 1.0, variant: Variant = "paper"
    ) -> None:
        super().__init__(config)
        check_variant("Sinusoidal", variant)
        self.variant = variant
        if not 0 < scale < math.inf:
            raise ValueError(f"Sinusoidal: scale must be above 0, got {scale}")
        self.scale = scale

    def shared(self, places: Places) -> Float[Tensor, "tokens width"]:
        """Return the embedding of every position, float64 inside."""
        width, at = self.config.embedding_width, places.positions
        if self.variant == "author":
            pairs = width // 2
            base = 10000.0 ** (pairs / max(pairs - 1, 1))
            angles = angles_of(at, rates_of(2 * pairs, base=base, device=at.device))
            waves = torch.cat((angles.sin(), angles.cos()), dim=-1)
            # Of an odd width the last number is left as it is.
            return pad(waves, (0, width - 2 * pairs)) * self.scale
        angles = angles_of(at, rates_of(width, device=at.device))
        waves = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)[:, :width]
        return waves * self.scale

    def embed(self, embeddings: Embeddings, prepared: Prepared) -> Embeddings:
        """Return embeddings + PE."""
        return embeddings + prepared.shared.to(embeddings.dtype)
