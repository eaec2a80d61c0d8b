"""Keys that a window does not hide (`always`): the first and the last token, or any others.

A key inside a query's window has been counted by the windowed call; of the few others the logits
are a matrix of queries × places. What both give is joined by the log-sum-exp of the first:

    o = e^(lse − total) · o_window + Σ e^(s − total) · v,      total = log(e^lse + Σ e^s)

over the places that the window hides and nothing else does. O(queries) time and memory, any device,
exact gradients, those of the scores at the places' own offsets among them.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from tisa.offsets import entry_of, offset_of, recentred, visible
from tisa.ops.call import Call, hiding
from tisa.shapes import Bool, Float, Int, Tensor


def windowed(call: Call) -> Call:
    """Return the call without the keys that are joined afterwards."""
    return replace(call, always=None, return_lse=True)


def joined(
    call: Call,
    output: Float[Tensor, "*batch_heads queries value_dim"],
    lse: Float[Tensor, "*batch_heads queries"],
) -> tuple[Float[Tensor, "*batch_heads queries value_dim"], Float[Tensor, "*batch_heads queries"]]:
    """Return what the call asks for, of what `windowed` of it gave."""
    assert call.always is not None
    if call.window == (None, None) or call.always.shape[-1] == 0:
        return output, lse
    vector = call.offset_logits(windowed=False)
    if not call.packed:
        return _join(call, vector, call.always, output, lse)
    assert call.cu_seqlens is not None
    # Tokens after the last sequence keep what they have.
    outputs, sums = [], []
    ends = call.cu_seqlens.tolist()
    for number, (first, last) in enumerate(pairwise(ends)):
        part = _Part(first, last)
        own = replace(
            call,
            query=part.cut(call.query), key=part.cut(call.key), value=part.cut(call.value),
            key_scores=None if call.key_scores is None else part.cut(call.key_scores),
            cu_seqlens=None, max_seqlen=0,
        )  # fmt: skip
        shorter = None if vector is None else recentred(vector, call.max_seqlen, last - first)
        places = call.always[number : number + 1]
        found = _join(own, shorter, places, part.cut(output), part.cut(lse))
        outputs.append(found[0][0].transpose(0, 1))
        sums.append(found[1][0].transpose(0, 1))
    last = ends[-1]
    return torch.cat((*outputs, output[last:])), torch.cat((*sums, lse[last:]))


@dataclass
class _Part:
    """One sequence of a packed batch."""

    first: int
    last: int

    def cut(self, tensor: Tensor) -> Tensor:
        """Return its part of (total, heads, …) as (1, heads, length, …): a view."""
        return tensor[self.first : self.last].transpose(0, 1).unsqueeze(0)


def _join(
    call: Call,
    vector: Float[Tensor, "heads_or_1 span"] | None,
    places: Int[Tensor, "batch places"],
    output: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor]:
    if call.query.numel() == 0 or call.key.numel() == 0:
        return output, lse
    index, hidden = _hidden(call, places)
    logits = _logits(call, vector, index).masked_fill(hidden.unsqueeze(1), -torch.inf)
    every = torch.cat((lse.unsqueeze(-1).to(logits.dtype), logits), dim=-1)
    blind = (every == -torch.inf).all(-1, keepdim=True)
    every = every.masked_fill(blind, 0.0)
    weights = every.softmax(-1).masked_fill(blind, 0.0)
    total = every.logsumexp(-1).masked_fill(blind.squeeze(-1), -torch.inf)
    of_window, of_places = weights[..., :1], weights[..., 1:]
    if call.dropout_p > 0:
        of_places = torch.nn.functional.dropout(of_places, call.dropout_p)
    values = _rows(call.value, index).to(weights.dtype).repeat_interleave(_group(call), dim=1)
    mixed = torch.addcmul(of_places @ values, output, of_window)
    return mixed.to(output.dtype), total


def _hidden(
    call: Call, places: Int[Tensor, "batch places"]
) -> tuple[Int[Tensor, "batch places"], Bool[Tensor, "batch queries places"]]:
    """Return places that are keys, and where a place adds nothing."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    places = places.long().expand(call.query.shape[0], -1)
    index = places.clamp(0, keys - 1)
    # A place that is none, and one that was named before.
    nothing = index != places
    nothing = nothing | (places[:, :, None] == places[:, None, :]).tril(-1).any(-1)
    i = torch.arange(queries, device=places.device)
    offsets = offset_of(i[:, None], index[:, None, :], call.query_start)
    counted = visible(offsets, call.window)
    assert counted is not None
    return index, counted | nothing[:, None, :]


def _logits(
    call: Call, vector: Tensor | None, index: Int[Tensor, "batch places"]
) -> Float[Tensor, "batch heads queries places"]:
    batch, heads, queries, _ = call.query.shape
    count = index.shape[1]
    query, keys = call.query.to(call.dtype), _rows(call.key, index).to(call.dtype)
    group = _group(call)
    if group > 1:
        query = query.unflatten(1, (-1, group)).flatten(2, 3)
    logits = (query @ keys.transpose(-1, -2) * call.scale).reshape(batch, heads, queries, count)
    if vector is not None:
        i = torch.arange(queries, device=index.device)
        entries = entry_of(i[:, None], index[:, None, :], queries).flatten(1).unsqueeze(1)
        rows = vector.expand(batch, *vector.shape)
        found = rows.gather(-1, entries.expand(-1, vector.shape[0], -1))
        logits = logits + found.unflatten(-1, (queries, count))
    if call.key_scores is not None:
        of_keys = call.key_scores.to(call.dtype).gather(
            -1, index.unsqueeze(1).expand(-1, heads, -1)
        )
        logits = logits + of_keys.unsqueeze(2)
    mask = call.attn_mask
    if mask is None:
        return logits
    if mask.shape[-1] > 1:
        mask = mask.expand(batch, -1, -1, -1)
        mask = mask.gather(-1, index[:, None, None, :].expand(-1, *mask.shape[1:3], -1))
    if mask.dtype == torch.bool:
        return logits.masked_fill(~mask, -torch.inf)
    return logits + hiding(mask, call.dtype)


def _rows(tensor: Tensor, index: Int[Tensor, "batch places"]) -> Tensor:
    """Return the rows at those places, (batch, heads, places, dim)."""
    index = index[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3])
    return tensor.gather(2, index)


def _group(call: Call) -> int:
    heads, key_heads = call.heads
    return heads // key_heads
