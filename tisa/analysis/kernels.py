"""How many kernels a head's curve needs: fits with S = 0, 1, … kernels, and their errors.

A head's curve is its mean diagonal, which is known better near offset 0, where n − |k| pairs were
averaged, so offsets count by that number; a constant is free, because softmax does not see it.
"""

from dataclasses import dataclass

import torch

from tisa.fitting import Kernels, explained, fit_path
from tisa.shapes import Float, Int, Tensor


@dataclass(frozen=True)
class KernelFits:
    """Fits of every head's curve with 0 … S kernels: kernels[S], r2[S, head], rms[S, head]."""

    offsets: Int[Tensor, " span"]
    kernels: tuple[Kernels, ...]
    constants: Float[Tensor, "sizes heads"]
    r2: Float[Tensor, "sizes heads"]
    rms: Float[Tensor, "sizes heads"]

    def curves(self, size: int) -> Float[Tensor, "heads span"]:
        """Return the fitted f(k) with `size` kernels, the free constant added."""
        return self.kernels[size].curve(self.offsets) + self.constants[size][:, None]


def fit_heads(
    curves: Float[Tensor, "heads span"],
    offsets: Int[Tensor, " span"],
    *,
    largest: int = 5,
    reach: int | None = None,
    weights: Float[Tensor, " span"] | None = None,
) -> KernelFits:
    """Return fits of S = 0 … `largest` kernels to each head's curve, on offsets up to `reach`.

    Of curves with more than 2,048 offsets, every so many of those beyond ±128 is fitted and stands
    for its neighbours.
    """
    if reach is not None:
        near = offsets.abs() <= reach
        curves, offsets = curves[:, near], offsets[near]
        weights = None if weights is None else weights[near]
    weights = torch.ones(len(offsets)) if weights is None else weights
    step = -(-len(offsets) // 2048)
    kept = (offsets.abs() <= 128) | (offsets % step == 0)
    weights = torch.where(offsets.abs() <= 128, weights, weights * step)[kept]
    curves, offsets = curves[:, kept], offsets[kept]
    share = (weights / weights.sum()).double()
    path = fit_path(curves, offsets, largest, weights=weights, up_to_constant=True)
    constants, r2, rms = [], [], []
    for kernels in path:
        left = curves.double() - kernels.curve(offsets)
        constant = (share * left).sum(-1)
        constants.append(constant)
        rms.append((share * (left - constant[:, None]) ** 2).sum(-1).sqrt())
        r2.append(explained(curves, offsets, kernels, weights=weights, up_to_constant=True))
    return KernelFits(offsets, path, torch.stack(constants), torch.stack(r2), torch.stack(rms))
