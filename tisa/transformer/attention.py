"""Self-attention with every hook of a position method: the place where positions meet attention."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import dropout

from tisa.offsets import offset_range, to_matrix
from tisa.ops import attention
from tisa.ops.api import GPUS
from tisa.ops.ring import ring_attention
from tisa.ops.scored import worth_a_band
from tisa.positions import Places, Position, Prepared
from tisa.shapes import Float, Tensor
from tisa.transformer.forward_pass import ForwardPass
from tisa.transformer.sinks import share_of_keys, with_sinks

# Attention weights that are made at a time where they have to be made: 64 MB in float32.
WEIGHTS_AT_ONCE = 1 << 24


class At(NamedTuple):
    """Where positions enter: the model's method, the layer that it is asked for, and the pass.

    In a mixture the layer has a `method` of its own, whose layers are counted by `own`.
    `key_scores` are those of this layer's hidden states: (batch, heads, keys), packed
    (total, heads).
    """

    position: Position
    layer: int
    run: ForwardPass
    key_scores: Tensor | None = None

    @property
    def method(self) -> Position:
        """The method whose hooks are asked."""
        return self.position.member(self.layer)[0]

    @property
    def own(self) -> int:
        """The layer's number among those of the method."""
        return self.position.member(self.layer)[1]

    @property
    def prepared(self) -> Prepared:
        """What the method computed once for all of its layers."""
        return self.position.prepared(self.layer, self.run.prepared)

    @property
    def window(self) -> int | None:
        """How far a query sees to both sides."""
        return self.run.windows[self.layer] if self.run.windows else None

    @property
    def is_dense(self) -> bool:
        """Whether the method has logits of every pair here."""
        return self.method.is_dense(self.own, self.prepared)

    def scores(self, query: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the scores of every offset, and a band outside which they are constant.

        The band only where it saves work: on a GPU, and not for few keys.
        """
        scores = self.method.offset_scores(self.own, self.prepared)
        dtype, bands = query.dtype, self.run.bands
        on_gpu = query.device.type in GPUS
        if scores is None or not on_gpu or not worth_a_band(dtype, self.prepared.places.keys):
            return scores, None
        if dtype not in bands:
            bands[dtype] = self.position.bands(dtype)
        return scores, bands[dtype][self.layer]

    @property
    def own_scores(self) -> Tensor | None:
        """What each query's own token has as a key: (batch, heads, queries), packed (total, heads).

        It is the same for all keys of a query, and matters to what stands beside them.
        """
        if self.key_scores is None or self.run.packing is not None:
            return self.key_scores
        first = self.prepared.places.query_start
        return self.key_scores[..., first : first + self.prepared.places.queries]

    def keyed(self, hidden: Tensor) -> "At":
        """Return this with the scores of all keys, the cached ones first.

        The cache has scores as they were made. The operator gets them in its dtype, less that of
        the first new token: small numbers are exact, and all keys of a query may lose the same.
        """
        if not self.method.scores_keys:
            return self
        cache, packed = self.run.cache, self.run.packing is not None
        before = None if cache is None else cache.key_scores.get(self.layer)
        last = None if before is None else before[..., -1:]
        scores = self.method.key_scores(self.own, hidden, last, self.prepared)
        if scores is None:
            return self
        if packed:
            scores = scores.transpose(0, 1)
        else:
            # No part of the graph: the softmax has no derivative by it. (A sum: of none it is 0.)
            first = scores.detach()[..., :1].sum(-1, keepdim=True)
            if cache is not None:
                scores = cache.extend_scores(self.layer, scores)
            scores = scores - first
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return self._replace(key_scores=scores.to(dtype))


class AttentionLayer(nn.Module):
    """Projections of queries, keys and values, attention, and the projection of its output.

    The position method is an argument of `forward`, with the number of the layer (or of the pass
    through it) for which it is asked: layers share it. Whatever its hooks allow goes through
    `tisa.attention`: everything but a method that wants the attention weights themselves.

    `sinks`: a learned logit for each head that no token has (`sinks.py`), N(0, 0.02) at step 0.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        *,
        uses_content: bool = True,
        biases: bool = True,
        is_causal: bool = False,
        attention_dropout: float = 0.0,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.is_causal = is_causal
        self.attention_dropout = attention_dropout
        sizes = (hidden_size, hidden_size, biases)
        self.query = nn.Linear(*sizes) if uses_content else None
        self.key = nn.Linear(*sizes) if uses_content else None
        self.value = nn.Linear(*sizes)
        self.output = nn.Linear(hidden_size, hidden_size)
        self.sinks = nn.Parameter(torch.empty(num_attention_heads)) if sinks else None
        if self.sinks is not None:
            nn.init.normal_(self.sinks, std=0.02)

    def forward(
        self,
        hidden: Float[Tensor, "*batch tokens hidden"],
        position: Position,
        layer: int,
        run: ForwardPass,
    ) -> Float[Tensor, "*batch tokens hidden"]:
        """Return what the layer adds to the hidden states."""
        at = At(position, layer, run).keyed(hidden)
        query, key, value = self._project(hidden, at)
        packing = run.packing
        if packing is None:
            mixed = self._attend(hidden, query, key, value, at)
        elif at.is_dense or at.method.needs_weights:
            query, key = (None if x is None else packing.pad(x) for x in (query, key))
            scores = None if at.key_scores is None else packing.pad(at.key_scores).transpose(1, 2)
            run = replace(run, attention_mask=packing.mask(), packing=None)
            at = at._replace(run=run, key_scores=scores)
            mixed = self._attend(packing.pad(hidden), query, key, packing.pad(value), at)
            mixed = packing.unpad(mixed)
        else:
            mixed = self._fused(query, key, value, None, at)
        return self.output(mixed.flatten(-2))

    def logits(
        self,
        hidden: Float[Tensor, "batch tokens hidden"],
        position: Position,
        layer: int,
        prepared: Prepared,
    ) -> Float[Tensor, "batch heads queries keys"]:
        """Return the logits of every pair before masks: what the softmax is taken of.

        A dense tensor, to look at; `forward` makes it only for methods that cannot do without.
        """
        at = At(position, layer, ForwardPass(prepared)).keyed(hidden)
        query, key, _ = self._project(hidden, at)
        if query is not None and key is not None:
            query, key = query.transpose(1, 2), key.transpose(1, 2)
        return self._logits(hidden, query, key, at)

    @property
    def _dropout_p(self) -> float:
        return self.attention_dropout if self.training else 0.0

    def _project(self, hidden: Tensor, at: At) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Return queries, keys and values with positions in them, (*batch, tokens, heads, dim)."""
        maps = (self.query, self.key, self.value)
        found = [None if m is None else m(hidden) for m in maps]
        added = at.method.project(at.own, at.prepared)
        if added is not None:
            found = [
                None if x is None else x + a.to(x.dtype) for x, a in zip(found, added, strict=True)
            ]
        heads = (self.num_attention_heads, -1)
        query, key, value = (None if x is None else x.unflatten(-1, heads) for x in found)
        if query is not None and key is not None:
            query, key = (at.method.rotate(x, at.prepared) for x in (query, key))
        assert value is not None
        return query, key, value

    def _attend(
        self,
        hidden: Float[Tensor, "batch tokens hidden"],
        query: Float[Tensor, "batch tokens heads dim"] | None,
        key: Float[Tensor, "batch tokens heads dim"] | None,
        value: Float[Tensor, "batch tokens heads dim"],
        at: At,
    ) -> Float[Tensor, "batch tokens heads dim"]:
        """Return each head's output for a padded batch."""
        method, run = at.method, at.run
        query, key = (None if x is None else x.transpose(1, 2) for x in (query, key))
        value = value.transpose(1, 2)
        if run.cache is not None:
            key, value = run.cache.extend(at.layer, key, value)
        mask = None if run.attention_mask is None else run.attention_mask[:, None, None, :]
        if method.needs_weights:
            return self._weighted(hidden, query, key, value, mask, at).transpose(1, 2)
        if at.is_dense:
            logits = method.dense_logits(at.own, query, hidden, at.prepared)
            if query is None:
                # No content: queries and keys of zeros, one wide.
                key = torch.zeros_like(value[..., :1])
                query = key.new_zeros(*key.shape[:2], hidden.shape[1], 1)
            else:
                query = method.content(at.own, query)
            if logits is not None:
                logits = logits.to(query.dtype)
                mask = logits if mask is None else logits.masked_fill(~mask, -torch.inf)
        return self._fused(query, key, value, mask, at).transpose(1, 2)

    def _weighted(
        self,
        hidden: Tensor,
        query: Tensor | None,
        key: Tensor | None,
        value: Float[Tensor, "batch heads keys dim"],
        mask: Tensor | None,
        at: At,
    ) -> Float[Tensor, "batch heads queries dim"]:
        """Return each head's output for a method that wants the weights themselves.

        Without gradients some queries at a time: no queries × keys in memory. (With them the
        weights of all are kept for the backward pass anyhow.)
        """
        places = at.prepared.places
        at_once = places.queries
        if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for_each = max(1, value.shape[0] * value.shape[1] * places.keys)
            at_once = max(1, WEIGHTS_AT_ONCE // for_each)
        if at_once >= places.queries:
            weights = self._weights(hidden, query, key, mask, at).to(value.dtype)
            mixed = weights @ value
            added = at.method.values(at.own, weights, at.prepared)
            return mixed if added is None else mixed + added
        parts = []
        for first in range(0, places.queries, at_once):
            some = slice(first, min(first + at_once, places.queries))
            start, stop = places.query_start + some.start, places.query_start + some.stop
            keys = stop if self.is_causal else places.keys
            stands = torch.arange(start, stop, device=value.device)
            here = at.position.prepare(Places(some.stop - some.start, keys, start, stands))
            part = self._weighted(
                hidden[:, some],
                None if query is None else query[:, :, some],
                None if key is None else key[:, :, :keys],
                value[:, :, :keys],
                None if mask is None else mask[..., :keys],
                at._replace(
                    run=ForwardPass(here, windows=at.run.windows),
                    key_scores=None if at.key_scores is None else at.key_scores[..., :keys],
                ),
            )
            parts.append(part)
        return torch.cat(parts, dim=2)

    def _fused(
        self, query: Tensor | None, key: Tensor | None, value: Tensor, mask: Tensor | None, at: At
    ) -> Tensor:
        """Return `tisa.attention` of a padded or a packed batch, in its layout."""
        assert query is not None
        assert key is not None
        scores, band = at.scores(query)
        ring, packing = at.run.ring, at.run.packing
        if ring is not None:
            # The sequence is spread over several processes.
            if self.sinks is not None:
                raise ValueError(
                    "sinks must be False with a ring, whose attention has no log-sum-exp"
                )
            if self._dropout_p:
                raise ValueError(f"attention_dropout must be 0 with a ring, got {self._dropout_p}")
            return ring_attention(
                query, key, value, scores, ring, band=band, is_causal=self.is_causal
            )
        found = attention(
            query,
            key,
            value,
            scores,
            band=band,
            key_scores=at.key_scores,
            attn_mask=mask,
            is_causal=self.is_causal,
            window=at.window,
            dropout_p=self._dropout_p,
            cu_seqlens=None if packing is None else packing.cu_seqlens,
            max_seqlen=None if packing is None else packing.max_seqlen,
            return_lse=self.sinks is not None,
        )
        if self.sinks is None:
            assert isinstance(found, Tensor)
            return found
        output, lse = found
        own = at.own_scores
        lse = lse if own is None else lse - own
        return with_sinks(output, lse, self.sinks, packed=packing is not None)

    def _logits(
        self, hidden: Tensor, query: Tensor | None, key: Tensor | None, at: At
    ) -> Float[Tensor, "batch heads queries keys"]:
        """Return all logits in float32 or better."""
        method, own = at.method, at.own
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        places = at.prepared.places
        logits = hidden.new_zeros(1, dtype=dtype)
        if query is not None and key is not None:
            asking = method.content(own, query) if at.is_dense else query
            logits = (asking @ key.transpose(-1, -2)).to(dtype) * query.shape[-1] ** -0.5
        scores = method.offset_scores(own, at.prepared)
        if scores is not None:
            logits = logits + to_matrix(scores.to(dtype), places.queries, places.keys)
        if at.key_scores is not None and at.own_scores is not None:
            scored = at.key_scores.unsqueeze(-2) - at.own_scores.unsqueeze(-1)
            logits = logits + scored.to(dtype)
        if at.is_dense:
            added = method.dense_logits(own, query, hidden, at.prepared)
            if added is not None:
                logits = logits + added.to(dtype)
        heads = self.num_attention_heads
        return logits.expand(hidden.shape[0], heads, places.queries, places.keys)

    def _weights(
        self, hidden: Tensor, query: Tensor | None, key: Tensor | None, mask: Tensor | None, at: At
    ) -> Float[Tensor, "batch heads queries keys"]:
        """Return the attention weights themselves, zeros for a query that may look at nothing."""
        logits = self._logits(hidden, query, key, at)
        if self.is_causal or at.window is not None:
            places = at.prepared.places
            reach = (places.queries, places.keys)
            offsets = offset_range(*reach, query_start=places.query_start, device=logits.device)
            farthest = places.keys if at.window is None else at.window
            hides = (offsets < -farthest) | (offsets > (0 if self.is_causal else farthest))
            unseen = torch.where(hides, -torch.inf, 0.0).to(logits.dtype)
            logits = logits + to_matrix(unseen, *reach)
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf)
        blind = (logits == -torch.inf).all(-1, keepdim=True)
        logits = logits.masked_fill(blind, 0.0)
        weights = logits.softmax(-1)
        if self.sinks is not None:
            lse = logits.logsumexp(-1, keepdim=True)
            weights = weights * share_of_keys(lse, self.sinks[:, None, None])
        return dropout(weights.masked_fill(blind, 0.0), self._dropout_p)
