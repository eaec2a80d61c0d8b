"""The angles of sinusoidal and rotary embeddings: every position times a rate for each pair."""

import math

import torch

from tisa.shapes import Float, Int, Tensor


def rates_of(
    width: int, *, base: float = 10000.0, device: torch.device | None = None
) -> Float[Tensor, " pairs"]:
    """Return base^(−2i/width) for each pair i, in float64 where the device has it."""
    # Metal has no float64.
    mps = device is not None and device.type == "mps"
    exact = torch.float32 if mps else torch.float64
    pair = torch.arange(0, width, 2, device=device, dtype=exact)
    return torch.exp(pair * (-math.log(base) / width))


def angles_of(
    positions: Int[Tensor, " tokens"], rates: Float[Tensor, " pairs"]
) -> Float[Tensor, "tokens pairs"]:
    """Return position · rate for each pair, whole turns taken off.

    The turns are taken off in float64, so that sines and cosines may be computed in float32 at any
    position. In float64 they are slow where they are fused into each layer (`torch.compile`).
    """
    turns = positions.to(rates.dtype).unsqueeze(-1) * (rates / (2 * math.pi))
    return (turns - turns.round()) * (2 * math.pi)
