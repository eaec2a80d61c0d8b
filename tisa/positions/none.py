"""No positions at all: attention over a set of tokens, the floor of every comparison."""

from tisa.positions.base import Position


class NoPosition(Position):
    """Every hook does nothing: a transformer with it cannot tell two orders of its input apart.

    (A causal one can, a little: its mask is a position method of sorts.)
    """
