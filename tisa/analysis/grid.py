"""Positions in two dimensions (ViT): how much of P depends on steps in rows and columns only."""

import torch

from tisa.analysis.toeplitz import Sums, sums_of
from tisa.offsets import offset_range
from tisa.shapes import Float, Tensor


def grid_fit(
    table: Float[Tensor, "places width"], rows: int, columns: int
) -> tuple[Float[Tensor, "down right"], float, float]:
    """Return the mean of P for each step down and right, R² of that fit, and R² off the diagonal.

    The best fit to P that is the same wherever on the grid two places lie; the two-dimensional
    counterpart of the Toeplitz fit. R² is NaN where P has no variance.
    """
    places = table.double().reshape(rows, columns, -1)
    size = (2 * rows, 2 * columns)
    spectrum = torch.fft.rfft2(places, s=size, dim=(0, 1)).abs().square().sum(-1)
    by_step = torch.fft.irfft2(spectrum, s=size).roll((rows - 1, columns - 1), (0, 1))[:-1, :-1]
    down, right = (side - offset_range(side, side).abs() for side in (rows, columns))
    counts = (down[:, None] * right).double()
    whole = sums_of(table)
    found = Sums(
        counts.reshape(-1), by_step.reshape(-1), whole.squares, whole.main, counts.numel() // 2
    )
    fit = (by_step / counts).float()
    return fit, float(found.r2()), float(found.r2(off_diagonal=True))
