"""One forward pass: where its tokens stand, what they may see, what came before them."""

from dataclasses import dataclass

import torch

from tisa.ops.ring import Ring
from tisa.positions import Places, Position, Prepared, places_of
from tisa.shapes import Bool, Tensor
from tisa.transformer.cache import Cache
from tisa.transformer.packing import Packing, packing_of


@dataclass(frozen=True)
class ForwardPass:
    """The position method, prepared for these places; padding mask, cache, packing."""

    prepared: Prepared
    attention_mask: Bool[Tensor, "batch keys"] | None = None
    cache: Cache | None = None
    packing: Packing | None = None
    ring: Ring | None = None

    @property
    def places(self) -> Places:
        """Where the tokens stand."""
        return self.prepared.places


def begin(
    position: Position,
    tokens: Tensor,
    *,
    layer: int = 0,
    is_causal: bool,
    attention_mask: Tensor | None,
    cache: Cache | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    ring: Ring | None = None,
) -> ForwardPass:
    """Return the pass for `tokens`, (batch, length, width) or packed (total, width).

    `layer` is the first layer that they go through.
    """
    if ring is not None:
        return _begin_in_a_ring(position, tokens, attention_mask, cache, cu_seqlens, ring)
    if cu_seqlens is not None:
        return _begin_packed(position, tokens, attention_mask, cache, cu_seqlens, max_seqlen)
    if max_seqlen is not None:
        raise ValueError(f"max_seqlen must be None without cu_seqlens, got {max_seqlen}")
    if tokens.ndim != 3:
        raise ValueError(
            "the input must be (batch, length, hidden), or (total, hidden) with cu_seqlens, "
            f"got {tokens.ndim - 1} axes before the hidden one"
        )
    if cache is not None and not is_causal:
        raise ValueError(
            "cache must be None in an encoder, whose tokens also see those after them; "
            "is_causal=True makes a decoder"
        )
    batch, length = tokens.shape[:2]
    if cache is not None and layer in cache.values and len(cache.values[layer]) != batch:
        raise ValueError(
            f"cache must be of as many sequences as the input, {batch}, got "
            f"{len(cache.values[layer])}; begin another batch with a new Cache()"
        )
    seen = 0 if cache is None else cache.length_of(layer)
    places = places_of(length, tokens.device, query_start=seen)
    if attention_mask is not None:
        if tuple(attention_mask.shape) != (batch, places.keys):
            raise ValueError(
                f"attention_mask must be (batch, keys) = {(batch, places.keys)}, the tokens in the "
                f"cache included, got {tuple(attention_mask.shape)}"
            )
        if attention_mask.is_floating_point():
            raise TypeError(
                f"attention_mask must be True or 1 for tokens, False or 0 for padding, got "
                f"{attention_mask.dtype}; convert it with .bool()"
            )
        attention_mask = attention_mask.bool()
    return ForwardPass(position.prepare(places), attention_mask, cache)


def _begin_packed(
    position: Position,
    tokens: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None,
    cu_seqlens: Tensor,
    max_seqlen: int | None,
) -> ForwardPass:
    if attention_mask is not None or cache is not None:
        name = "attention_mask" if cache is None else "cache"
        raise ValueError(f"{name} must be None with cu_seqlens: a packed batch has no padding")
    if tokens.ndim != 2:
        raise ValueError(
            "with cu_seqlens the input must be (total, hidden), without a batch axis, "
            f"got {tokens.ndim - 1} axes before the hidden one"
        )
    if max_seqlen is None:
        raise ValueError("max_seqlen must be the longest sequence's length, got None")
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"cu_seqlens must be int32, got {cu_seqlens.dtype}; convert with .int()")
    if cu_seqlens.ndim != 1 or not cu_seqlens.shape[0]:
        raise ValueError(
            "cu_seqlens must have one axis, the ends of the sequences after a leading 0, got shape "
            f"{tuple(cu_seqlens.shape)}"
        )
    packing = packing_of(tokens.shape[0], cu_seqlens, max_seqlen)
    return ForwardPass(position.prepare(packing.places()), packing=packing)


def _begin_in_a_ring(
    position: Position,
    tokens: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None,
    cu_seqlens: Tensor | None,
    ring: Ring,
) -> ForwardPass:
    for name, value in (
        ("attention_mask", attention_mask), ("cache", cache), ("cu_seqlens", cu_seqlens),
    ):  # fmt: skip
        if value is not None:
            raise ValueError(f"{name} must be None with a ring: every token of it is one to read")
    if position.dense or position.needs_weights:
        raise ValueError(
            f"{type(position).__name__} cannot be used with a ring: it needs logits of every pair "
            "of tokens; methods of the offset, rotary, absolute and sinusoidal ones can"
        )
    positions = ring.positions(tokens.device)
    if tokens.ndim != 3 or tokens.shape[1] != len(positions):
        raise ValueError(
            f"with a ring the input must be (batch, {len(positions)}, …), this process's tokens, "
            f"got {tuple(tokens.shape)}; `ring.shard` cuts them out"
        )
    # Scores for the whole sequence, positions of these tokens.
    places = Places(ring.length, ring.length, 0, positions)
    return ForwardPass(position.prepare(places), ring=ring)
