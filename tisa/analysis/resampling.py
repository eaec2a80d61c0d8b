"""What chance alone gives: nulls and bootstrap intervals for the Toeplitz R².

Null. Independent Gaussian rows already score R² ≈ d/(d + n) on the whole matrix, from the main
diagonal alone, and ≈ 2/n off it, because 2n − 1 means are fitted to n² numbers.

Bootstrap. Neighbouring positions are alike, so blocks of consecutive positions are drawn, not
single ones. A pair of blocks counts as often as both were drawn together; copies of one block are
not paired with each other. Fewer distinct blocks fit their diagonals better, which shifts all draws
upwards; the interval is the draws' spread around their own mean, put around the estimate.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tisa.analysis.toeplitz import Diagonals, sums_of
from tisa.shapes import Float, Tensor


@dataclass(frozen=True)
class Null:
    """Mean and standard deviation of R² over random tables, whole and off the diagonal."""

    whole: float
    whole_deviation: float
    off_diagonal: float
    off_diagonal_deviation: float
    draws: int


def gaussian_null(
    positions: int,
    width: int,
    *,
    draws: int = 10,
    seed: int = 0,
    deviation: float = 1.0,
    prepare: Callable[[Tensor], Tensor] | None = None,
) -> Null:
    """Return the R² of P for independent Gaussian rows of that shape.

    `prepare` is what was done to the real table first (centring, say); where it adds a constant,
    the rows' `deviation` matters.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(draws):
        table = deviation * torch.randn(positions, width, generator=generator)
        sums = sums_of(prepare(table) if prepare else table)
        found.append([float(sums.r2(off_diagonal=o)) for o in (False, True)])
    values = torch.tensor(found, dtype=torch.float64)
    mean, spread = values.mean(0).tolist(), values.std(0, correction=0).tolist()
    return Null(mean[0], spread[0], mean[1], spread[1], draws)


def shuffled_null(
    left: Float[Tensor, "positions width"],
    right: Float[Tensor, "positions width"],
    *,
    causal: bool = False,
    draws: int = 5,
    seed: int = 0,
) -> float:
    """Return the mean R² of left · rightᵀ when the positions are put in random order."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(draws):
        order = torch.randperm(left.shape[0], generator=generator)
        found.append(float(sums_of(left[order], right[order], causal=causal).r2()))
    return sum(found) / draws


def bootstrap_interval(
    sums: Diagonals,
    *,
    off_diagonal: bool = False,
    draws: int = 400,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Return an interval of R² from drawing blocks of positions anew; NaN where R² is."""
    blocks = sums.counts.shape[0]
    estimate = sums.whole().r2(off_diagonal=off_diagonal)
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randint(blocks, (draws, blocks), generator=generator)
    times = torch.nn.functional.one_hot(picked, blocks).sum(1).double()
    weights = times[:, :, None] * times[:, None, :]
    weights.diagonal(dim1=1, dim2=2).copy_(times)
    some = max(1, 2**20 // (blocks * sums.counts.shape[-1]))
    found = torch.cat([sums.drawn(w).r2(off_diagonal=off_diagonal) for w in weights.split(some)])
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    # A draw of one block alone may have no variance.
    low, high = (estimate + torch.nanquantile(found - found.nanmean(), ends)).tolist()
    return low, high
