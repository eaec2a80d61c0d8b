"""What every position method is: hooks that say where position enters a transformer.

A transformer calls every hook of whatever method it was given, at the place that the hook's name
says, and knows nothing else about it:

    embed             input embeddings
    project           what is added to queries, keys and values, layer by layer
    rotate            queries and keys, each by its own position
    offset_scores     scores of the offset key − query, for `tisa.attention`
    key_scores        scores of each key, from the hidden states, for `tisa.attention`
    content           the queries of the content logits, which a method may weigh or leave out
    dense_logits      logits of every pair of tokens
    values            what is added to the output of each query, from its attention weights

Each of them does nothing until a method overrides it. What does not depend on the layer is computed
once for a forward pass, in `prepare`, and handed to every hook as `prepared.shared`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from tisa import shapes
from tisa.scoring.base import check_flags
from tisa.scoring.published import groups, only
from tisa.shapes import Bool, Float, Int, Int32, Tensor

# Which layers a method's parameters serve: every layer its own, all the same, or the first alone.
# Whose formula where a paper and its authors' code differ.
Variant = Literal["paper", "author"]
Layers = Literal["each", "shared", "first"]


def check_variant(owner: str, variant: str, *more: str) -> None:
    """Refuse a variant that is neither the paper's nor the author's, nor one of `more`."""
    known = ("paper", "author", *more)
    if variant not in known:
        raise ValueError(f"{owner}: variant must be one of {', '.join(known)}, got {variant!r}")


@dataclass(frozen=True)
class PositionConfig:
    """What a position method has to know of the transformer that it serves.

    `options` are the keyword arguments of the method itself. `embedding_size` is the width of the
    input embeddings where it is not `hidden_size` (ALBERT).
    """

    hidden_size: int = 768
    num_attention_heads: int = 12
    num_hidden_layers: int = 12
    max_position_embeddings: int = 512
    is_causal: bool = False
    embedding_size: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_flags(type(self).__name__, is_causal=self.is_causal)
        for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_position_embeddings < 1:
            raise ValueError(
                f"max_position_embeddings must be at least 1, got {self.max_position_embeddings}"
            )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads, got {self.hidden_size} "
                f"and {self.num_attention_heads}"
            )

    @property
    def head_size(self) -> int:
        """The width of one head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def embedding_width(self) -> int:
        """The width of the input embeddings."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size


@dataclass(frozen=True)
class Places:
    """Where the tokens of one call stand.

    `positions` has the position of every query; keys stand at 0 … keys − 1. With a cache there are
    more keys than queries, and the first query stands at `query_start`. In a packed batch
    `positions` restart at 0 with every sequence, and `queries` and `keys` are the length of the
    longest one. `present` tells the new tokens from padding, None where nobody said.
    """

    queries: int
    keys: int
    query_start: int
    positions: Int[Tensor, " tokens"]
    present: Bool[Tensor, "batch tokens"] | None = None


def places_of(length: int, device: torch.device | None = None, *, query_start: int = 0) -> Places:
    """Return the places of that many new tokens after `query_start` tokens in a cache."""
    keys = query_start + length
    return Places(length, keys, query_start, torch.arange(query_start, keys, device=device))


class Prepared(NamedTuple):
    """One forward pass: its places, and what the method computed once for all layers."""

    places: Places
    shared: Any = None


class Position(nn.Module):
    """A position method that does nothing; a method overrides the hooks where it enters.

    `max_length` is the longest input that the method has parameters for, None where there is no
    limit. `dense` is True where `content` and `dense_logits` are to be asked, which need a padded
    batch (`is_dense` says in which layers and passes). `uses_content` is False where attention
    never looks at q·k, so that a layer needs no projections of queries and keys. `needs_weights` is
    True where `values` is to be asked, which keeps the layer from the fused kernels. `scores_keys`
    is True where `key_scores` is to be asked. `causal_only` says why a method cannot be in an
    encoder, None where it can. `biases` is False where the maps to queries, keys and values have
    none.
    """

    max_length: int | None = None
    dense: bool = False
    uses_content: bool = True
    needs_weights: bool = False
    scores_keys: bool = False
    causal_only: str | None = None
    biases: bool = True

    def __init__(self, config: PositionConfig, *, layers: Layers = "each") -> None:
        super().__init__()
        if layers not in ("each", "shared", "first"):
            raise ValueError(f'layers must be "each", "shared" or "first", got {layers!r}')
        if self.causal_only and not config.is_causal:
            raise ValueError(
                f"{type(self).__name__}: is_causal must be True (a decoder), got False: "
                f'{self.causal_only}; in an encoder take "near-far" or another function of the '
                "offset"
            )
        self.config = config
        self.layers = layers

    @property
    def copies(self) -> int:
        """How many sets of per-layer parameters there are."""
        return self.config.num_hidden_layers if self.layers == "each" else 1

    def copy_of(self, layer: int) -> int | None:
        """Return which set of parameters a layer uses; None where it has no positions."""
        if self.layers == "each":
            return layer
        return 0 if self.layers == "shared" or layer == 0 else None

    def prepare(self, places: Places) -> Prepared:
        """Return the places with what all layers share, or refuse an input that is too long."""
        self.check_length(places)
        return Prepared(places, self.shared(places))

    def check_length(self, places: Places) -> None:
        """Refuse an input with positions that the method has no parameters for."""
        if self.max_length is not None and places.keys > self.max_length:
            raise ValueError(
                f"{type(self).__name__}: the input must have at most {self.max_length} tokens "
                f"(max_position_embeddings), got {places.keys}; shorten it, or build the model "
                "with a larger max_position_embeddings"
            )

    def member(self, layer: int) -> tuple["Position", int]:
        """Return the method of a layer, and the layer's number as that method counts.

        They are this one, and the number itself, but in a mixture of several.
        """
        return self, layer

    def prepared(self, layer: int, prepared: Prepared) -> Prepared:
        """Return the pass as the layer's method prepared it."""
        return prepared

    def shared(self, places: Places) -> Any:
        """Return what is computed once for all layers."""
        return None

    def embed(self, embeddings: shapes.Embeddings, prepared: Prepared) -> shapes.Embeddings:
        """Return the input embeddings, with positions where the method puts them there."""
        return embeddings

    def project(
        self, layer: int, prepared: Prepared
    ) -> Float[Tensor, "three tokens hidden"] | None:
        """Return what is added to the layer's queries, keys and values before heads are split."""
        return None

    def rotate(self, heads: shapes.Heads, prepared: Prepared) -> shapes.Heads:
        """Return queries or keys of new tokens, rotated by their positions."""
        return heads

    def offset_scores(self, layer: int, prepared: Prepared) -> shapes.Scores | None:
        """Return one score per head and offset, in the order of `tisa.offsets`."""
        return None

    def band(self, layer: int, dtype: torch.dtype) -> Int32[Tensor, "heads 2"] | None:
        """Return the offsets outside which those scores are constant, for the fused kernels."""
        return None

    def bands(self, dtype: torch.dtype) -> list[Int32[Tensor, "heads 2"] | None]:
        """Return the band of every layer."""
        return [self.band(layer, dtype) for layer in range(self.config.num_hidden_layers)]

    def key_scores(
        self,
        layer: int,
        hidden: Float[Tensor, "*batch tokens hidden"],
        before: Float[Tensor, "batch heads 1"] | None,
        prepared: Prepared,
    ) -> Float[Tensor, "*batch heads tokens"] | None:
        """Return what is added to every logit of each new token as a key; asked if `scores_keys`.

        `before` is that of the last token in the cache. What all keys of a query have in common
        does not matter, so that sums over the tokens may begin anywhere.
        """
        return None

    def is_dense(self, layer: int, prepared: Prepared) -> bool:
        """Return whether `content` and `dense_logits` are to be asked in this layer and pass.

        A method that is a function of the offset up to some length says so here.
        """
        return self.dense

    def content(self, layer: int, query: shapes.Queries) -> shapes.Queries:
        """Return the queries that the content logits are made of; asked if `dense`."""
        return query

    def dense_logits(
        self, layer: int, query: shapes.Queries | None, hidden: shapes.Hidden, prepared: Prepared
    ) -> shapes.Logits | None:
        """Return logits of every pair, added to the scaled content logits; asked if `dense`."""
        return None

    def values(
        self, layer: int, weights: shapes.Weights, prepared: Prepared
    ) -> shapes.Queries | None:
        """Return what is added to each query's output; asked if `needs_weights`."""
        return None

    def vectors(self) -> Tensor | None:
        """Return the learned vector of each position, None where the method has none."""
        return None

    def read_reference(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take the weights of the authors' checkpoint; a method without any refuses."""
        raise ValueError(f"{type(self).__name__}: its authors published no weights for it")

    def of_layers(self, state_dict: Mapping[str, Tensor], *names: str) -> list[dict[str, Tensor]]:
        """Return a checkpoint's tensors of these names for each set of our parameters."""
        owner = type(self).__name__
        found = groups(owner, state_dict, names)
        if self.layers == "shared":
            return [only(found, owner)]
        if len(found) != self.copies:
            raise ValueError(
                f"{owner}.from_reference: state_dict must have {', '.join(names)} of "
                f"{self.copies} layers (the config's num_hidden_layers), got {len(found)}"
            )
        return found

    def extra_repr(self) -> str:
        """Return what `print(module)` shows."""
        return f"layers={self.layers!r}"
