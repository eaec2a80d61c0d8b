"""Positions in two dimensions (ViT): how much of P depends on steps in rows and columns only."""

import math

import torch

from tisa.shapes import Float, Int, Tensor


def grid_offsets(rows: int, columns: int) -> Int[Tensor, "places places"]:
    """Return for each pair of places the number of its (row step, column step)."""
    place = torch.arange(rows * columns)
    down = place[None] // columns - place[:, None] // columns + rows - 1
    right = place[None] % columns - place[:, None] % columns + columns - 1
    return down * (2 * columns - 1) + right


def grid_fit(
    table: Float[Tensor, "places width"], rows: int, columns: int
) -> tuple[Float[Tensor, "down right"], float, float]:
    """Return the mean of P for each step down and right, R² of that fit, and R² off the diagonal.

    The best fit to P that is the same wherever on the grid two places lie; the two-dimensional
    counterpart of the Toeplitz fit. R² is NaN where P has no variance.
    """
    gram = (table.double() @ table.double().T).reshape(-1)
    steps = grid_offsets(rows, columns).reshape(-1)
    size = (2 * rows - 1) * (2 * columns - 1)
    zeros = torch.zeros(size, dtype=torch.float64)
    counts = zeros.index_add(0, steps, torch.ones_like(gram))
    fit = zeros.index_add(0, steps, gram) / counts
    left = gram - fit[steps]
    both = []
    for kept in (torch.ones_like(steps, dtype=torch.bool), steps != size // 2):
        total = ((gram[kept] - gram[kept].mean()) ** 2).sum()
        constant = bool(total <= 1e-12 * (gram[kept] ** 2).sum())
        both.append(math.nan if constant else float(1 - (left[kept] ** 2).sum() / total))
    return fit.reshape(2 * rows - 1, 2 * columns - 1).float(), both[0], both[1]
