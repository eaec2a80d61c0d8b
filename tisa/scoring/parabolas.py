"""Parabolas in place of a curve: what three of its values say of those between them.

Far from the query most curves are smooth. Over a stretch of offsets from c − reach to c + reach the
parabola through f(c − r), f(c) and f(c + r) stands for f, and with t = k − c

    P(t) = A + B·t + C·t²        |f − P| ≤ bend(reach) · max |f‴|        r = spread(reach)

The three values lie where Chebyshev's do, rounded to whole offsets, so that they are entries of the
score vector; what a parabola gives back in the gradient goes to these three entries.
"""

import math

from tisa.shapes import Float, Tensor


def spread(reach: int) -> int:
    """Return how far from the middle of a stretch its outer two values are taken."""
    return max(1, round(reach * math.sqrt(3) / 2))


def bend(reach: int) -> float:
    """Return the largest error of a parabola over a stretch for a third derivative of 1."""
    r = spread(reach)
    # Of the remainder t·(t² − r²)/6: at its inner extremum and at the ends.
    return max(r**3 / math.sqrt(27) * 2, reach * abs(reach**2 - r**2)) / 6


def coefficients(
    before: Float[Tensor, "*places"],
    middle: Float[Tensor, "*places"],
    after: Float[Tensor, "*places"],
    reach: int,
) -> tuple[Float[Tensor, "*places"], Float[Tensor, "*places"], Float[Tensor, "*places"]]:
    """Return A, B and C of the parabolas through f(c − r), f(c) and f(c + r)."""
    r = spread(reach)
    return middle, (after - before) / (2 * r), (after - 2 * middle + before) / (2 * r * r)
