"""A position table's slow part: its vectors at some places, and lines between them.

What `positions="extend"` keeps beside the scores. Attention that depends on place itself, and the
drift of hidden states with place, are slow; what is quick is order, which the scores are fitted to.
Places stand close at the beginning, where position vectors change most, and ever further apart. The
vectors are those of least squares over all rows of the table. The first row is taken as it is: it
belongs to a token that always stands first, and is nothing like its neighbours.

One place more lies beyond the table, with the mean of its rows: there place has faded out, and from
there on the model is translation-invariant.
"""

import torch

from tisa.hf.core import Places
from tisa.shapes import Float, Tensor

# Of a table's positions at most a tenth, and never more; the one beyond makes 48 of them.
MOST = 47
# The gap at a share x of the places is as x to this power less 1: 1 is even.
GROWTH = 1.5
# How far beyond the last position place has faded out, in tables.
FADE = 0.5


def most_places(positions: int) -> int:
    """Return how many places are kept of a table of so many positions unless a number is given."""
    return max(2, min(MOST, positions // 10))


def knots_of(positions: int, count: int) -> list[int]:
    """Return so many places, 0 and from 1 to the last with growing gaps, and the one beyond."""
    knots = [0]
    for number in range(count - 1):
        share = (number / max(1, count - 2)) ** GROWTH
        knots.append(max(knots[-1] + 1, 1 + round(share * (positions - 2))))
    return [*knots, positions - 1 + round(FADE * positions)]


def place_vectors(
    rows: Float[Tensor, "positions dim"], knots: list[int]
) -> Float[Tensor, "places dim"]:
    """Return the vectors at these places: their lines are nearest to all rows of the table."""
    inner, wide = knots[:-1], rows.double()
    module = Places(inner, len(inner), torch.float64).to(rows.device)
    with torch.no_grad():
        module.places.copy_(torch.eye(len(inner)))
        lines = module(torch.arange(len(rows), device=rows.device))
    rest = torch.linalg.lstsq(lines[1:, 1:], wide[1:]).solution
    return torch.cat((wide[:1], rest, wide[1:].mean(0, keepdim=True))).to(rows.dtype)
