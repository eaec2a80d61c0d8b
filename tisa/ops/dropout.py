"""Dropout as a pure function of a seed and a place, so that backends drop the same entries.

A backend that recomputes attention in the backward pass must drop again what it dropped before,
block by block, in any order, on any device, inside a compiled graph. A random generator has a
state and cannot do that; an integer hash of (seed, batch, head, query, key) can. Of a GPU kernel it
is a large share, so a weight takes two multiplications: rows and keys are spread before.
"""

import torch

from tisa.shapes import Float, Int, Tensor


def drawn_seed(like: torch.Tensor) -> torch.Tensor:
    """Return a new seed from torch's generator of that tensor's device."""
    return torch.randint(2**31 - 1, (), dtype=torch.int32, device=like.device)


# An operator of our own, so that a compiled graph draws the seed as eager code does: the same
# `torch.manual_seed` gives the same entries in both.
@torch.library.custom_op(
    "tisa::dropout_seed", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def dropout_seed(like: torch.Tensor) -> torch.Tensor:
    """Return a new seed, as a node of the graph where there is one."""
    return drawn_seed(like)


@dropout_seed.register_fake
def _(like: torch.Tensor) -> torch.Tensor:
    return like.new_empty((), dtype=torch.int32)


def _mixed(x: Tensor) -> Tensor:
    """Return a 32-bit hash of each integer (two multiplications, "lowbias32")."""
    # `>>` on a signed integer copies the sign; the masks cut it off. In place: a block is large.
    x = x ^ _shifted(x, 16, 0xFFFF)
    x *= 0x7FEB352D
    x ^= _shifted(x, 15, 0x1FFFF)
    x *= 0x846CA68B - 2**32
    x ^= _shifted(x, 16, 0xFFFF)
    return x


def _shifted(x: Tensor, bits: int, mask: int) -> Tensor:
    shifted: Tensor = x >> bits
    shifted &= mask
    return shifted


def kept(
    seed: Int[Tensor, ""],
    dropout_p: float,
    *,
    batch: Int[Tensor, " batch"],
    head: Int[Tensor, " heads"],
    query: Int[Tensor, " queries"],
    key: Int[Tensor, " keys"],
    out: Tensor | None = None,
) -> Tensor:
    """Return which attention weights are kept, for every combination of the indices.

    In bool, (batch, heads, queries, keys), or as 1 and 0 in `out`.
    """
    state = _mixed(_mixed(seed + batch.int())[:, None] ^ _mixed(head.int()))[:, :, None]
    row = state + query.int() * (0x9E3779B1 - 2**32)
    row ^= _shifted(row, 16, 0xFFFF)
    row *= 0x7FEB352D
    # All that is done for each weight; its lowest bits are not looked at.
    drawn = row[..., None] ^ (key.int() * (0x85EBCA6B - 2**32))
    drawn *= 0x7FEB352D
    drawn ^= _shifted(drawn, 15, 0x1FFFF)
    drawn *= 0x846CA68B - 2**32
    # Compared as unsigned numbers are: a signed one with its highest bit turned.
    drawn ^= -(2**31)
    least = 2 * min(int(dropout_p * 2**31), 2**31 - 1) - 2**31
    return drawn >= least if out is None else torch.ge(drawn, least, out=out)


def kept_scale(dropout_p: float) -> float:
    """Return the factor that keeps the expected weight what it was."""
    return 0.0 if dropout_p == 1 else 1 / (1 - dropout_p)


def drop(
    weights: Float[Tensor, "batch heads queries keys"], dropout_p: float, seed: Int[Tensor, ""]
) -> Float[Tensor, "batch heads queries keys"]:
    """Return the weights with some entries dropped and the rest scaled up."""
    batch, head, query, key = (torch.arange(n, device=weights.device) for n in weights.shape)
    keep = kept(seed, dropout_p, batch=batch, head=head, query=query, key=key)
    return torch.where(keep, weights, 0.0) * kept_scale(dropout_p)
