"""Attention sinks: a logit in the softmax's denominator that no token has (gpt-oss, 2025).

softmax over the keys and one logit s more, which has no value, is the softmax over the keys times
Z/(Z + e^s) = σ(log Z − s), Z the sum of the exponentials. So any attention that returns its
log-sum-exp has sinks, at the price of one multiplication. Only there does it matter what all keys
of a query have in common: scores of the key are taken as distances from that of the query's token.
"""

import torch

from tisa.shapes import Float, Tensor


def share_of_keys(
    lse: Float[Tensor, "*some"], sinks: Float[Tensor, "*rest"]
) -> Float[Tensor, "*some"]:
    """Return which share of the attention the keys have: σ(lse − s), 0 for a query without keys.

    `sinks` has the head's logit, in a shape that broadcasts to that of `lse`.
    """
    return torch.sigmoid(lse - sinks.to(lse.dtype))


def with_sinks(
    output: Float[Tensor, "*batch_heads dim"],
    lse: Float[Tensor, "*batch_heads"],
    sinks: Float[Tensor, " heads"],
    *,
    packed: bool = False,
) -> Float[Tensor, "*batch_heads dim"]:
    """Return the output of attention as it is with one more logit for each head.

    `output` and `lse` are what `tisa.attention(…, return_lse=True)` returned: (batch, heads,
    queries, dim), or packed (total, heads, dim).
    """
    share = share_of_keys(lse, sinks if packed else sinks.unsqueeze(-1))
    return (output * share.unsqueeze(-1)).to(output.dtype)
