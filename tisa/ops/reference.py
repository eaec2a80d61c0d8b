"""The specification: eager PyTorch, float32 inside (float64 for float64), any order of derivative.

softmax(q·kᵀ·scale + f(key − query) + mask) · v, and zeros for a query that may look at nothing.
Every other backend is tested against this one.
"""

import torch

from tisa.ops.call import Call
from tisa.ops.dropout import drop, dropout_seed
from tisa.shapes import Float, Tensor


def refuses(call: Call) -> str | None:
    """Return why this backend cannot do the call, or None."""
    return None


def attend(
    call: Call,
) -> tuple[Float[Tensor, "*batch_heads queries value_dim"], Float[Tensor, "*batch_heads queries"]]:
    """Return the attention output in the query's dtype and the log-sum-exp of the logits."""
    query, key, value = (x.to(call.dtype) for x in (call.query, call.key, call.value))
    if call.packed:
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    group = call.heads[0] // call.heads[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))

    logits = query @ key.transpose(-1, -2) * call.scale
    added = call.dense_logits()
    if added is not None:
        logits = logits + added
    blind = (logits == -torch.inf).all(-1, keepdim=True)
    logits = logits.masked_fill(blind, 0.0)
    lse = logits.logsumexp(-1).masked_fill(blind.squeeze(-1), -torch.inf)
    weights = logits.softmax(-1).masked_fill(blind, 0.0)
    if call.dropout_p > 0:
        # Detached: torch.func takes no operator without a derivative if its input has one.
        weights = drop(weights, call.dropout_p, dropout_seed(call.query.detach()))
    output = (weights @ value).to(call.query.dtype)
    if call.packed:
        return output[0].transpose(0, 1), lse[0].transpose(0, 1)
    return output, lse
