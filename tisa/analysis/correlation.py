"""How two columns of numbers go together: Pearson's correlation with its interval."""

import math

import torch

from tisa.shapes import Float, Tensor


def correlation_interval(
    x: Float[Tensor, " models"], y: Float[Tensor, " models"], *, level: float = 0.95
) -> tuple[float, float, float] | None:
    """Return Pearson's correlation and the ends of its interval (Fisher's transformation).

    With fewer than four pairs the interval is all there is, −1 … 1. None where it is not defined:
    fewer than two models, or all of them with the same value.
    """
    # Not by the deviation, which rounding keeps above 0.
    if len(x) < 2 or any(float(part.min()) == float(part.max()) for part in (x, y)):
        return None
    r = float(torch.corrcoef(torch.stack((x.double(), y.double())))[0, 1])
    if len(x) < 4:
        return r, -1.0, 1.0
    z = math.atanh(max(-0.999999, min(0.999999, r)))
    half = float(torch.special.ndtri(torch.tensor((1 + level) / 2))) / math.sqrt(len(x) - 3)
    return r, math.tanh(z - half), math.tanh(z + half)
