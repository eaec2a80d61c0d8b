"""How much of a matrix is a function of the offset: the Toeplitz fit and its R².

The least-squares Toeplitz fit of a matrix is the mean of each diagonal, so

    R² = 1 − Σ (P − T)² / Σ (P − mean P)²,

and the sums of every diagonal and of its squares are all that it needs. They are gathered block by
block, so that of a product A Bᵀ never more than some rows exist, and a bootstrap over blocks of
positions (`resampling`) costs next to nothing.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from tisa.offsets import join_block_diagonals, sum_diagonals
from tisa.shapes import Float, Tensor

BLOCKS = 16


@dataclass(frozen=True)
class Diagonals:
    """Sums along the diagonals of each pair of blocks: entries, values, squares (float64)."""

    counts: Float[Tensor, "blocks blocks block_span"]
    sums: Float[Tensor, "blocks blocks block_span"]
    squares: Float[Tensor, "blocks blocks block_span"]
    positions: int

    def whole(self, *, causal: bool = False) -> Float[Tensor, "3 span"]:
        """Return counts, sums and squares of the matrix's diagonals, in the order of offsets.

        With `causal` of those up to offset 0, the main diagonal being the last.
        """
        stacked = torch.stack((self.counts, self.sums, self.squares))
        joined = join_block_diagonals(stacked)
        surplus = (joined.shape[-1] + 1) // 2 - self.positions
        end = surplus + self.positions if causal else joined.shape[-1] - surplus
        return joined[..., surplus:end]


def diagonals(
    left: Float[Tensor, "positions width"],
    right: Float[Tensor, "positions width"] | None = None,
    *,
    blocks: int = BLOCKS,
) -> Diagonals:
    """Return the sums along the diagonals of left · rightᵀ (of left · leftᵀ without `right`)."""
    positions = left.shape[0]
    size = max(1, -(-positions // min(blocks, positions)))
    blocks = -(-positions // size)
    # Large products in float32: half the time, and R² still right to five digits.
    dtype = torch.float64 if positions <= 1024 else torch.float32
    left = _padded(left, blocks * size).to(dtype)
    right = left if right is None else _padded(right, blocks * size).to(dtype)
    sums, squares = [], []
    for start in range(0, blocks * size, size):
        rows = slice(start, start + size)
        values = (left[rows] @ right.T).reshape(size, blocks, size).transpose(0, 1)
        sums.append(sum_diagonals(values).double())
        squares.append(sum_diagonals(values.square_()).double())
    counts = _counts(positions, blocks, size)
    return Diagonals(counts, torch.stack(sums), torch.stack(squares), positions)


@lru_cache(maxsize=8)
def _counts(positions: int, blocks: int, size: int) -> Tensor:
    """Return how many entries each diagonal of each pair of blocks has; the last may be short."""
    there = _padded(torch.ones(positions, 1), blocks * size).reshape(blocks, size)
    return sum_diagonals(there[:, None, :, None] * there[None, :, None, :])


def _padded(table: Tensor, rows: int) -> Tensor:
    full = torch.zeros(rows, table.shape[1], dtype=torch.float64)
    full[: table.shape[0]] = table
    return full


def r2_of_sums(
    counts: Float[Tensor, "*draws span"],
    sums: Float[Tensor, "*draws span"],
    squares: Float[Tensor, "*draws span"],
    *,
    off_diagonal: bool = False,
) -> Float[Tensor, "*draws"]:
    """Return R² from the sums of each diagonal; NaN where the matrix has no variance to explain."""
    if off_diagonal:
        keep = torch.ones(counts.shape[-1], dtype=torch.bool)
        keep[counts.shape[-1] // 2] = False
        counts, sums, squares = counts[..., keep], sums[..., keep], squares[..., keep]
    fitted = torch.where(counts > 0, sums**2 / counts.clamp_min(1e-30), 0.0).sum(-1)
    mean = sums.sum(-1) ** 2 / counts.sum(-1)
    total, explained = squares.sum(-1) - mean, fitted - mean
    # Below the rounding of the sums themselves there is nothing left to explain.
    constant = total <= 1e-12 * squares.sum(-1)
    return torch.where(constant, torch.nan, explained / total.clamp_min(1e-300))


def written(r2: float | None, digits: int = 3) -> str:
    """Return R² as people read it: – where it is not defined."""
    return "–" if r2 is None or math.isnan(r2) else f"{r2:.{digits}f}"


def toeplitz_r2(
    left: Float[Tensor, "positions width"],
    right: Float[Tensor, "positions width"] | None = None,
    *,
    off_diagonal: bool = False,
) -> float:
    """Return R² of left · rightᵀ around its mean; `off_diagonal` leaves the main diagonal out."""
    counts, sums, squares = diagonals(left, right).whole()
    return float(r2_of_sums(counts, sums, squares, off_diagonal=off_diagonal))


def mean_diagonal(
    left: Float[Tensor, "positions width"], right: Float[Tensor, "positions width"] | None = None
) -> Float[Tensor, " span"]:
    """Return the Toeplitz fit of left · rightᵀ as a score vector: the mean of each diagonal."""
    counts, sums, _ = diagonals(left, right).whole()
    return sums / counts


def centred(table: Float[Tensor, "positions width"]) -> Float[Tensor, "positions width"]:
    """Return the table with the mean of every column taken off."""
    return table - table.mean(0, keepdim=True)
