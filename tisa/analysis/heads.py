"""What single heads make of positions: F̂_P = E_P W_Q W_Kᵀ E_Pᵀ / √d_k, and which heads care.

A head is called position-sensitive when, within a row, its positional logits have a standard
deviation of at least `SENSITIVE`, one logit: the odds between places then differ by a factor of e,
and softmax over Gaussian logits uses e^(−½) ≈ 61 % of the places. What a row has in common softmax
does not see.
"""

from dataclasses import dataclass

import torch

from tisa.analysis.resampling import shuffled_null
from tisa.analysis.toeplitz import causal_rows, sums_of
from tisa.shapes import Float, Tensor

SENSITIVE = 1.0


@dataclass(frozen=True)
class Heads:
    """One layer's heads: Toeplitz R² of F̂_P, its null, how strong it is, its mean diagonal."""

    r2: Float[Tensor, " heads"]
    off_diagonal: Float[Tensor, " heads"]
    null: Float[Tensor, " heads"]
    strength: Float[Tensor, " heads"]
    curves: Float[Tensor, "heads span"]

    @property
    def sensitive(self) -> list[bool]:
        """Return which heads' logits move with position."""
        return [s >= SENSITIVE for s in self.strength.tolist()]


def factors(
    table: Float[Tensor, "positions width"],
    query: Float[Tensor, "width dim"],
    key: Float[Tensor, "width dim"],
) -> tuple[Float[Tensor, "positions dim"], Float[Tensor, "positions dim"]]:
    """Return A and B with F̂_P = A Bᵀ: the scaled queries and the keys of all positions."""
    return (table @ query) * query.shape[-1] ** -0.5, table @ key


def positional_attention(
    table: Float[Tensor, "positions width"],
    query: Float[Tensor, "heads width dim"],
    key: Float[Tensor, "heads width dim"],
) -> Float[Tensor, "heads rows columns"]:
    """Return F̂_P of every head; of `block_means` of a table the means of F̂_P's squares."""
    pairs = (factors(table, *maps) for maps in zip(query, key, strict=True))
    return torch.stack([a @ b.T for a, b in pairs])


def block_means(
    table: Float[Tensor, "positions width"], size: int
) -> Float[Tensor, "blocks width"]:
    """Return the means of consecutive rows, at most `size` of them; a short rest is left out."""
    step = -(-table.shape[0] // size)
    whole = table.shape[0] // step * step
    return table[:whole].reshape(-1, step, table.shape[1]).mean(1)


def analyse_heads(
    table: Float[Tensor, "positions width"],
    query: Float[Tensor, "heads width dim"],
    key: Float[Tensor, "heads width dim"],
    *,
    causal: bool = False,
    null_draws: int = 5,
) -> Heads:
    """Return Toeplitz R², null, strength and mean diagonal of every head of one layer.

    The null is the head's own R² with the positions in random order; 0 draws leave it out (NaN).
    With `causal` only pairs count that a decoder sees, and mean diagonals end at offset 0.
    """
    r2, off, null, strength, curves = [], [], [], [], []
    for head in range(query.shape[0]):
        a, b = factors(table, query[head], key[head])
        found = sums_of(a, b, causal=causal)
        r2.append(float(found.r2()))
        off.append(float(found.r2(off_diagonal=True)))
        null.append(
            shuffled_null(a, b, causal=causal, draws=null_draws) if null_draws else float("nan")
        )
        strength.append(row_deviation(a, b, causal=causal))
        curves.append(found.sums / found.counts)
    return Heads(
        torch.tensor(r2),
        torch.tensor(off),
        torch.tensor(null),
        torch.tensor(strength),
        torch.stack(curves).float(),
    )


def row_deviation(
    left: Float[Tensor, "positions dim"],
    right: Float[Tensor, "positions dim"],
    *,
    causal: bool = False,
) -> float:
    """Return the standard deviation within rows of left · rightᵀ, rows averaged in the square."""
    spread = right - right.mean(0)
    if causal:
        count = torch.arange(1, len(left) + 1)
        sums, squares = causal_rows(left, spread)
        return float((squares / count - (sums / count) ** 2).mean().clamp_min(0).sqrt())
    covariance = spread.T @ spread / right.shape[0]
    return float(((left @ covariance) * left).sum(1).mean().clamp_min(0).sqrt())
