"""ALiBi: a fixed linear penalty on distance (Press et al., ICLR 2022)."""

import math

import torch

from tisa.scoring.base import ScoringFunction
from tisa.shapes import Float, Int, Int32, Tensor


class ALiBi(ScoringFunction):
    """ALiBi: f(k) = −m_h·|k|, fixed slopes m_h = 2^(−8h/H) for heads h = 1 … H; no parameters.

    When H is no power of two, the slopes are those of the next lower power of two P, followed by
    every other slope of 2P, as published. The same at step 0 and ever after.
    """

    def slopes(self) -> Float[Tensor, " heads"]:
        """Return m of each head."""
        heads = self.num_attention_heads
        power = 2 ** math.floor(math.log2(heads))
        head = torch.arange(heads, device=self._place.device, dtype=self._dtype)
        own = 8 * (head + 1) / power
        between = 4 * (2 * (head - power) + 1) / power
        return torch.exp2(-torch.where(head < power, own, between))

    def scores(self, offsets: Int[Tensor, "*shape"]) -> Float[Tensor, "heads *shape"]:
        """Return −m·|k| of each offset for each head."""
        distance = self._distances(offsets).abs().reshape(-1)
        flat = -self.slopes().unsqueeze(-1) * distance
        return flat.reshape(self.num_attention_heads, *offsets.shape)

    def support(self, eps: float) -> None:
        """Return None: the tail falls for ever."""
        return None

    def parabola_support(self, eps: float, reach: int) -> Int32[Tensor, "heads 2"]:
        """Return the query's own place: on either side of it the scores are a line."""
        heads, device = self.num_attention_heads, self._place.device
        return torch.zeros(heads, 2, dtype=torch.int32, device=device)
