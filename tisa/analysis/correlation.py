"""How two columns of numbers go together: Pearson's correlation with its interval."""

import math

import torch

from tisa.shapes import Float, Tensor


def correlation_interval(
    x: Float[Tensor, " models"], y: Float[Tensor, " models"], *, level: float = 0.95
) -> tuple[float, float, float]:
    """Return Pearson's correlation and the ends of its interval (Fisher's transformation).

    With fewer than four pairs the interval is all there is, −1 … 1.
    """
    if len(x) < 2 or float(x.std()) == 0 or float(y.std()) == 0:
        raise ValueError(
            "correlation: expected at least two models whose values differ, "
            f"got {x.tolist()} and {y.tolist()}"
        )
    r = float(torch.corrcoef(torch.stack((x.double(), y.double())))[0, 1])
    if len(x) < 4:
        return r, -1.0, 1.0
    z = math.atanh(max(-0.999999, min(0.999999, r)))
    half = float(torch.special.ndtri(torch.tensor((1 + level) / 2))) / math.sqrt(len(x) - 3)
    return r, math.tanh(z - half), math.tanh(z + half)
