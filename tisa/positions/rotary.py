"""Rotary position embeddings (Su et al., 2021)."""

import math

import torch

from tisa.positions.angles import angles_of
from tisa.positions.base import Places, Position, PositionConfig, Prepared
from tisa.shapes import Float, Heads, Tensor


class Rotary(Position):
    """Pairs of dimensions of q and k at position m rotated by the angles m·base^(−2i/d).

    d is the head's width. Values are untouched, and q·k depends on the offset of their positions
    only. Pair i is (x_i, x_{i + d/2}) as most models have it, or with `interleaved` (x_2i, x_2i+1)
    as in the paper. No parameters; any length.
    """

    def __init__(
        self, config: PositionConfig, *, base: float = 10000.0, interleaved: bool = False
    ) -> None:
        super().__init__(config)
        if config.head_size % 2:
            raise ValueError(
                f"Rotary: heads must have an even width, got {config.head_size} (hidden_size / "
                "num_attention_heads)"
            )
        if not 0 < base < math.inf:
            raise ValueError(f"Rotary: base must be above 0, got {base}")
        self.base = base
        self.interleaved = interleaved

    def shared(self, places: Places) -> Float[Tensor, "tokens one pairs"]:
        """Return every position's angles."""
        width = self.config.head_size
        return angles_of(places.positions, width, base=self.base).unsqueeze(1)

    def rotate(self, heads: Heads, prepared: Prepared) -> Heads:
        """Return the queries or keys rotated, computed in float32 or better."""
        dtype = torch.promote_types(heads.dtype, torch.float32)
        angles = prepared.shared.to(dtype)
        cosines, sines = angles.cos(), angles.sin()
        inner = heads.to(dtype)
        if self.interleaved:
            first, second = inner[..., 0::2], inner[..., 1::2]
        else:
            first, second = inner.chunk(2, dim=-1)
        turned = (first * cosines - second * sines, first * sines + second * cosines)
        if self.interleaved:
            return torch.stack(turned, dim=-1).flatten(-2).to(heads.dtype)
        return torch.cat(turned, dim=-1).to(heads.dtype)

    def extra_repr(self) -> str:
        """Return what `print(module)` shows."""
        return f"base={self.base:g}, interleaved={self.interleaved}"
