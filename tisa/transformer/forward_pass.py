"""One forward pass: where its tokens stand, what they may see, what came before them.

A packed batch has sequences end to end, no padding, no attention from one to another. Most methods
work on the packed batch itself. The ones that need logits of every pair get it padded, and their
output is packed again.
"""

from dataclasses import dataclass, field, replace

import torch

from tisa.ops.ring import Ring
from tisa.positions import Places, Position, Prepared, places_of
from tisa.shapes import Bool, Float, Int, Int32, Tensor
from tisa.transformer.cache import Cache


@dataclass(frozen=True)
class Packing:
    """Sequence s of a packed batch is the tokens from cu_seqlens[s] to cu_seqlens[s + 1]."""

    cu_seqlens: Int32[Tensor, " ends"]
    max_seqlen: int
    sequence: Int[Tensor, " total"]
    positions: Int[Tensor, " total"]

    def places(self) -> Places:
        """Return where the tokens stand: positions begin at 0 with every sequence."""
        return Places(self.max_seqlen, self.max_seqlen, 0, self.positions)

    def pad(self, packed: Float[Tensor, "total *rest"]) -> Float[Tensor, "batch length *rest"]:
        """Return a padded batch, zeros after the end of a sequence."""
        rest = packed.shape[1:]
        padded = packed.new_zeros(self.cu_seqlens.shape[0] - 1, self.max_seqlen, *rest)
        return padded.index_put((self.sequence, self.positions), packed)

    def unpad(self, padded: Float[Tensor, "batch length *rest"]) -> Float[Tensor, "total *rest"]:
        """Return the packed batch again."""
        return padded[self.sequence, self.positions]

    def mask(self) -> Bool[Tensor, "batch length"]:
        """Return which places of the padded batch hold a token."""
        lengths = self.cu_seqlens.diff()
        places = torch.arange(self.max_seqlen, device=lengths.device)
        return places < lengths.unsqueeze(-1)


@dataclass(frozen=True)
class ForwardPass:
    """The position method, prepared for these places; padding mask, cache, packing."""

    prepared: Prepared
    attention_mask: Bool[Tensor, "batch keys"] | None = None
    cache: Cache | None = None
    packing: Packing | None = None
    ring: Ring | None = None
    # How far a query of each layer sees; empty where all see everything.
    windows: tuple[int | None, ...] = ()
    # Of every layer, by the dtype that attention is computed in: made when the first layer asks.
    bands: dict[torch.dtype, list[Tensor | None]] = field(default_factory=dict)

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
    windows: tuple[int | None, ...] = (),
) -> ForwardPass:
    """Return the pass for `tokens`, (batch, length, width) or packed (total, width).

    `layer` is the first layer that they go through, `windows` how far a query of each layer sees.
    """
    if ring is not None:
        if windows:
            raise ValueError(f"window must be None with a ring, got {windows}")
        return _begin_in_a_ring(position, tokens, attention_mask, cache, cu_seqlens, ring)
    if cu_seqlens is not None:
        begun = _begin_packed(position, tokens, attention_mask, cache, cu_seqlens, max_seqlen)
        return replace(begun, windows=windows)
    if max_seqlen is not None:
        raise ValueError(f"max_seqlen must be None without cu_seqlens, got {max_seqlen}")
    if tokens.ndim != 3:
        raise ValueError(
            "the input must be (batch, length, hidden), or (total, hidden) with cu_seqlens, "
            f"got {tokens.ndim - 1} axes before the hidden one"
        )
    if cache is not None and not is_causal:
        raise ValueError(
            "cache must be None in an encoder, where a token also sees the tokens after it; "
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
        if position.scores_keys:
            new = attention_mask[:, seen:]
            places = Places(places.queries, places.keys, seen, places.positions, new)
    return ForwardPass(position.prepare(places), attention_mask, cache, windows=windows)


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
    if position.scores_keys:
        raise ValueError(
            f"{type(position).__name__} cannot be used with a ring: it needs sums over all tokens, "
            "of which a process has some"
        )
    positions = ring.positions(tokens.device)
    if tokens.ndim != 3 or tokens.shape[1] != len(positions):
        raise ValueError(
            f"with a ring the input must be (batch, {len(positions)}, …), this process's tokens, "
            f"got {tuple(tokens.shape)}; `ring.shard` cuts them out"
        )
    # Scores for the whole sequence, positions of these tokens.
    prepared = position.prepare(Places(ring.length, ring.length, 0, positions))
    layers = range(position.config.num_hidden_layers)
    if position.needs_weights or any(position.is_dense(layer, prepared) for layer in layers):
        raise ValueError(
            f"{type(position).__name__} cannot be used with a ring: it needs logits of every pair "
            f"of {ring.length} tokens; methods of the offset, rotary, absolute and sinusoidal ones "
            "can"
        )
    return ForwardPass(prepared, ring=ring)


def packing_of(total: int, cu_seqlens: Int32[Tensor, " ends"], max_seqlen: int) -> Packing:
    """Return the packing of `total` tokens, all of which must belong to a sequence."""
    tokens = torch.arange(total, device=cu_seqlens.device)
    ends = cu_seqlens.long()
    # Of all ends, not of a slice, which Inductor up to PyTorch 2.11 cannot search on a GPU.
    sequence = torch.searchsorted(ends, tokens, right=True) - 1
    covered = ends[-1] == total
    # Here, since what places tokens by these numbers would put them anywhere, or nowhere.
    rising = (ends[0] == 0) & (ends.diff() >= 0).all()
    fits = (ends.diff() <= max_seqlen).all()
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        # One question, so that one small kernel asks it.
        torch._assert_async(
            covered & rising & fits,
            "cu_seqlens must rise from 0 to the number of tokens, by max_seqlen at most",
        )
    elif not covered:
        raise ValueError(
            f"cu_seqlens must end with the number of tokens, {total}, got {int(ends[-1])}; "
            "leave padding out of a packed batch"
        )
    elif not rising:
        raise ValueError(
            f"cu_seqlens must rise from 0, got {ends.tolist()}; they are the ends of the "
            "sequences, after a leading 0"
        )
    elif not fits:
        raise ValueError(
            f"max_seqlen must be at least the longest sequence's length, {int(ends.diff().max())}, "
            f"got {max_seqlen}"
        )
    return Packing(cu_seqlens, max_seqlen, sequence, tokens - ends[sequence])
