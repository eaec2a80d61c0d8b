"""What single heads make of positions: F̂_P = E_P W_Q W_Kᵀ E_Pᵀ / √d_k, and which heads care.

A head is called position-sensitive when, within a row, its positional logits have a standard
deviation of at least `SENSITIVE`, one logit: the odds between places then differ by a factor of e,
and softmax over Gaussian logits uses e^(−½) ≈ 61 % of the places. What a row has in common softmax
does not see.
"""

from dataclasses import dataclass

import torch

from tisa.analysis.resampling import shuffled_null
from tisa.analysis.toeplitz import diagonals, r2_of_sums
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
    *,
    size: int | None = None,
) -> Float[Tensor, "heads rows columns"]:
    """Return F̂_P of every head; with `size`, the means of at most size × size equal squares."""
    found = []
    for head in range(query.shape[0]):
        a, b = factors(table, query[head], key[head])
        if size is not None:
            # The mean over a rectangle of A Bᵀ is the product of the means.
            a, b = block_means(a, size), block_means(b, size)
        found.append(a @ b.T)
    return torch.stack(found)


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
        found = diagonals(a, b).whole(causal=causal)
        counts, sums, _ = found
        r2.append(float(r2_of_sums(*found)))
        others = found[:, :-1] if causal else found
        off.append(float(r2_of_sums(*others, off_diagonal=not causal)))
        null.append(
            shuffled_null(a, b, causal=causal, draws=null_draws) if null_draws else float("nan")
        )
        strength.append(row_deviation(a, b, causal=causal))
        curves.append(sums / counts)
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
    if causal:
        seen = torch.ones(len(left), len(right), dtype=torch.bool).tril()
        count = seen.sum(1, keepdim=True)
        logits = left @ right.T
        spread = torch.where(seen, logits - torch.where(seen, logits, 0).sum(1, True) / count, 0)
        return float((spread.square().sum(1) / count[:, 0]).mean().sqrt())
    spread = right - right.mean(0)
    covariance = spread.T @ spread / right.shape[0]
    return float(((left @ covariance) * left).sum(1).mean().clamp_min(0).sqrt())
