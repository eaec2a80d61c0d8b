"""Attention in float64, from the operator's documentation alone: the oracle of `fuzz.py`."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fuzz_calls import Drawn

Results = dict[str, Tensor]


def oracle(call: Drawn, leaves: Results, kept: Tensor | None, *, rounded: bool = False) -> Results:
    """Return output, log-sum-exp and weights by the formula, as eager code does, in its dtype.

    In float64 this is the oracle. In a model's dtype it is the eager code that errors are compared
    with: scores, masks and softmax in float32 or, with `rounded`, scores and masks rounded to the
    dtype after each row's largest is taken off them, which is what "sdpa" promises.
    """
    query, key, value = (leaves[name] for name in ("query", "key", "value"))
    options, device = call.options, query.device
    if "cu_seqlens" in options:
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    wide = torch.promote_types(query.dtype, torch.float32)
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))

    offset, hidden, entry_of_zero = places(options, queries, keys, device)
    added = torch.zeros(1, 1, queries, keys, dtype=wide, device=device)
    if "scores" in leaves:
        held = offset.expand(heads, queries, keys)
        if "band" in options:
            lowest, highest = options["band"].long().sort(-1).values.unbind(-1)
            held = held.clamp(lowest[:, None, None], highest[:, None, None])
        entry = (held + entry_of_zero).clamp(0, leaves["scores"].shape[1] - 1)
        scores = leaves["scores"].gather(1, entry.flatten(1)).view(1, heads, queries, keys)
        hidden = hidden | (scores == -torch.inf)
        added = added + scores.masked_fill(hidden, 0.0)
    if "key_scores" in leaves:
        of_keys = leaves["key_scores"]
        of_keys = of_keys.T[None] if "cu_seqlens" in options else of_keys
        hidden = hidden | (of_keys == -torch.inf)[:, :, None]
        added = added + of_keys[:, :, None].masked_fill(hidden, 0.0)
    if "mask" in leaves:
        mask = leaves["mask"]
        if mask.dtype == torch.bool:
            hidden = hidden | ~mask
        else:
            # "The lowest number of its dtype hides as −inf does."
            lowest = torch.finfo(call.tensors["mask"].dtype).min
            hidden = hidden | (mask <= (lowest if lowest > -1e5 else -(2.0**127)))
            added = added + mask.to(wide).masked_fill(hidden, 0.0)
    if rounded:
        top = added.masked_fill(hidden, -torch.inf).amax(-1, keepdim=True).detach()
        added = (added - top.masked_fill(top == -torch.inf, 0.0)).masked_fill(hidden, 0.0)
        added = added.clamp_min(torch.finfo(query.dtype).min).to(query.dtype).to(wide)
    scale = options.get("scale", 1 / math.sqrt(query.shape[-1]))
    logits = (query @ key.transpose(-1, -2)).to(wide) * scale + added
    blind = hidden.expand(logits.shape).all(-1, keepdim=True)
    logits = logits.masked_fill(hidden, -torch.inf).masked_fill(blind, 0.0)
    lse = logits.logsumexp(-1).masked_fill(blind[..., 0], -torch.inf)
    weights = logits.softmax(-1).masked_fill(blind, 0.0)
    used = weights if kept is None else weights * kept / (1 - options["dropout_p"])
    output = used.to(value.dtype) @ value
    if "cu_seqlens" in options:
        output, lse = output[0].transpose(0, 1), lse[0].transpose(0, 1)
    # The largest logit relative to what is added most, as "sdpa" has it.
    height = (query @ key.transpose(-1, -2) * scale).detach().abs().max()
    largest = lse.detach().masked_fill(lse == -torch.inf, 0.0).abs().max()
    return {"output": output, "lse": lse, "weights": weights, "height": height,
            "largest lse": largest}  # fmt: skip


def places(options: dict[str, Any], queries: int, keys: int, device: Any) -> tuple[Any, ...]:
    """Return offsets (queries, keys), who is hidden by place alone, and the entry of offset 0."""
    i = torch.arange(queries, device=device)[:, None]
    j = torch.arange(keys, device=device)[None, :]
    if "cu_seqlens" in options:
        ends = options["cu_seqlens"].tolist()
        sequence = torch.full((queries,), -1, device=device)
        for number, (first, last) in enumerate(pairwise(ends)):
            sequence[first:last] = number
        offset, entry_of_zero = j - i, options["max_seqlen"] - 1
        hidden = (sequence[:, None] != sequence[None, :]) | (sequence[:, None] < 0)
    else:
        start = int(options.get("query_start", keys - queries))
        offset, entry_of_zero = j - i - start, queries - 1 + start
        hidden = torch.zeros(queries, keys, dtype=torch.bool, device=device)
    window = options.get("window")
    left, right = window if isinstance(window, tuple) else (window, window)
    if options.get("is_causal"):
        hidden = hidden | (offset > 0)
    if left is not None:
        hidden = hidden | (offset < -left)
    if right is not None:
        hidden = hidden | (offset > right)
    return offset, hidden[None, None], entry_of_zero


def kept_weights(seed: int, p: float, shape: tuple[int, ...]) -> Tensor:
    """Return which weights dropout keeps: the hash that `tisa/ops/dropout.py` documents."""

    def mixed(x: Any) -> Any:
        x = x ^ (x >> np.uint32(16))
        x = x * np.uint32(0x7FEB352D)
        x = x ^ (x >> np.uint32(15))
        x = x * np.uint32(0x846CA68B)
        return x ^ (x >> np.uint32(16))

    b, h, i, j = np.ix_(*(np.arange(n, dtype=np.uint32) for n in shape))
    row = mixed(mixed(np.uint32(seed) + b) ^ mixed(h)) + i * np.uint32(0x9E3779B1)
    row = (row ^ (row >> np.uint32(16))) * np.uint32(0x7FEB352D)
    drawn = (row ^ (j * np.uint32(0x85EBCA6B))) * np.uint32(0x7FEB352D)
    drawn = (drawn ^ (drawn >> np.uint32(15))) * np.uint32(0x846CA68B)
    return torch.from_numpy(drawn >= 2 * min(int(p * 2**31), 2**31 - 1))
