"""The angles of sinusoidal and rotary embeddings: every position times a rate for each pair."""

import math

import torch

from tisa.shapes import Float, Int, Tensor


def angles_of(
    positions: Int[Tensor, " tokens"], width: int, *, base: float = 10000.0
) -> Float[Tensor, "tokens pairs"]:
    """Return position · base^(−2i/width) for each pair i, whole turns taken off.

    The turns are taken off in float64, so that sines and cosines may be computed in float32 at any
    position. In float64 they are slow where they are fused into each layer (`torch.compile`).
    """
    # Metal has no float64.
    exact = torch.float32 if positions.device.type == "mps" else torch.float64
    pair = torch.arange(0, width, 2, device=positions.device, dtype=exact)
    rates = torch.exp(pair * (-math.log(base) / width)) / (2 * math.pi)
    turns = positions.to(exact).unsqueeze(-1) * rates
    return (turns - turns.round()) * (2 * math.pi)
