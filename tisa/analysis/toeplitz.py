"""How much of a matrix is a function of the offset: the Toeplitz fit and its R².

The least-squares Toeplitz fit of a matrix is the mean of each diagonal, so

    R² = 1 − Σ (P − T)² / Σ (P − mean P)²,

and the sum of every diagonal and the sum of all squares are all that it needs. Of a product A Bᵀ
both follow from the factors: the diagonals are correlations of columns, Σ P² is the trace of
AᵀA · BᵀB. The product itself is never held. With the sums of each pair of blocks of positions a
bootstrap over these blocks (`resampling`) costs next to nothing.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from tisa.offsets import join_block_diagonals, offset_range, sum_product_diagonals
from tisa.shapes import Float, Tensor

BLOCKS = 16
# Rows in float64 at a time.
ROWS = 512


@dataclass(frozen=True)
class Sums:
    """What R² needs of a matrix, or of several (float64).

    counts, sums: entries of each diagonal and their sum; entry `zero` is the main one.
    squares, main: the sum of the squares of all entries, and of those on the main diagonal.
    """

    counts: Float[Tensor, "*draws span"]
    sums: Float[Tensor, "*draws span"]
    squares: Float[Tensor, "*draws"]
    main: Float[Tensor, "*draws"]
    zero: int

    def r2(self, *, off_diagonal: bool = False) -> Float[Tensor, "*draws"]:
        """Return R²; NaN where the matrix has no variance to explain."""
        counts, sums, squares = self.counts, self.sums, self.squares
        if off_diagonal:
            keep = torch.arange(counts.shape[-1]) != self.zero
            counts, sums, squares = counts[..., keep], sums[..., keep], squares - self.main
        fitted = torch.where(counts > 0, sums**2 / counts.clamp_min(1e-30), 0.0).sum(-1)
        mean = sums.sum(-1) ** 2 / counts.sum(-1)
        total, explained = squares - mean, fitted - mean
        # Below the rounding of the sums themselves there is nothing left to explain.
        constant = total <= 1e-12 * self.squares
        return torch.where(constant, torch.nan, explained / total.clamp_min(1e-300))


def sums_of(
    left: Float[Tensor, "positions width"],
    right: Float[Tensor, "positions width"] | None = None,
    *,
    causal: bool = False,
) -> Sums:
    """Return the sums of left · rightᵀ (of left · leftᵀ without `right`), diagonals by offset.

    With `causal` of offsets up to 0 only, the main diagonal being the last.
    """
    right = left if right is None else right
    positions = len(left)
    counts = (positions - offset_range(positions, positions).abs()).double()
    one = left[None]
    sums = sum_product_diagonals(one, one if right is left else right[None])[0, 0]
    main = sum((a * b).sum(-1).square().sum() for a, b in _in_double(left, right))
    if causal:
        squares = causal_rows(left, right)[1].sum()
        counts, sums = counts[:positions], sums[:positions]
    else:
        gram = _gram(left)
        squares = (gram * (gram if right is left else _gram(right))).sum()
    return Sums(counts, sums, squares, torch.as_tensor(main), positions - 1)


def causal_rows(
    left: Float[Tensor, "positions width"], right: Float[Tensor, "positions width"]
) -> Float[Tensor, "2 positions"]:
    """Return the sum and the sum of squares of each row of left · rightᵀ up to its diagonal."""
    width = left.shape[1]
    before, gram = (torch.zeros(shape, dtype=torch.float64) for shape in (width, (width, width)))
    found = []
    for a, b in _in_double(left, right):
        seen = (a @ b.T).tril()
        earlier = torch.stack((a @ before, ((a @ gram) * a).sum(-1)))
        found.append(earlier + torch.stack((seen.sum(-1), seen.square().sum(-1))))
        before += b.sum(0)
        gram += b.T @ b
    return torch.cat(found, 1)


def _in_double(*tables: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield some rows of each table at a time, in float64."""
    for parts in zip(*(table.split(ROWS) for table in tables), strict=True):
        yield tuple(part.double() for part in parts)


def _gram(table: Tensor) -> Tensor:
    total = table.new_zeros(table.shape[1], table.shape[1], dtype=torch.float64)
    for (part,) in _in_double(table):
        total.addmm_(part.T, part)
    return total


@dataclass(frozen=True)
class Diagonals:
    """The sums of P = E Eᵀ by pairs of blocks of positions, main squares by block (float64)."""

    counts: Float[Tensor, "blocks blocks block_span"]
    sums: Float[Tensor, "blocks blocks block_span"]
    squares: Float[Tensor, "blocks blocks"]
    main: Float[Tensor, " blocks"]

    def whole(self) -> Sums:
        """Return the sums of P itself, one draw."""
        return self.drawn(torch.ones_like(self.squares)[None])

    def drawn(self, weights: Float[Tensor, "draws blocks blocks"]) -> Sums:
        """Return the sums of matrices in which each pair counts so often."""
        counts, sums = (join_block_diagonals(part, weights) for part in (self.counts, self.sums))
        squares = (weights * self.squares).sum((1, 2))
        main = weights.diagonal(dim1=1, dim2=2) @ self.main
        return Sums(counts, sums, squares, main, counts.shape[1] // 2)


def diagonals(table: Float[Tensor, "positions width"], *, blocks: int = BLOCKS) -> Diagonals:
    """Return the sums of P = table · tableᵀ for each pair of blocks of consecutive positions."""
    positions, width = table.shape
    size = max(1, -(-positions // min(blocks, positions)))
    blocks = -(-positions // size)
    padded = pad(table, (0, 0, 0, blocks * size - positions)).reshape(blocks, size, width)
    if blocks * size <= width:  # P is smaller than its table
        flat = padded.flatten(0, 1).double()
        squares = (flat @ flat.T).square().reshape(blocks, size, blocks, size).sum((1, 3))
    else:
        grams = torch.stack([_gram(block).flatten() for block in padded])
        squares = grams @ grams.T
    main = torch.stack([part.double().square().sum(-1).square().sum() for part in padded])
    # Entries (i, j) of a block with j − i = k; the last block may be short.
    k = offset_range(size, size)
    there = (positions - size * torch.arange(blocks)).clamp(max=size)
    ends = torch.minimum(there[:, None, None], there[:, None] - k)
    counts = (ends - (-k).clamp_min(0)).clamp_min(0).double()
    return Diagonals(counts, sum_product_diagonals(padded, padded), squares, main)


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
    return float(sums_of(left, right).r2(off_diagonal=off_diagonal))


def mean_diagonal(
    left: Float[Tensor, "positions width"], right: Float[Tensor, "positions width"] | None = None
) -> Float[Tensor, " span"]:
    """Return the Toeplitz fit of left · rightᵀ as a score vector: the mean of each diagonal."""
    found = sums_of(left, right)
    return found.sums / found.counts


def centred(table: Float[Tensor, "positions width"]) -> Float[Tensor, "positions width"]:
    """Return the table with the mean of every column taken off."""
    return table - table.mean(0, keepdim=True)
