"""The drop-in module for a transformer of your own: (batch, length, hidden) in and out."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from tisa.positions import Given, Position, PositionConfig, build_position, places_of
from tisa.scoring.base import check_flags
from tisa.shapes import Bool, Float, Int, Int32, Tensor
from tisa.transformer.attention import AttentionLayer
from tisa.transformer.cache import Cache
from tisa.transformer.config import checked_window, windows_of
from tisa.transformer.forward_pass import begin


class SelfAttention(nn.Module):
    """Multi-head self-attention with a position method of its own.

    `position` is a name from `tisa.positions.METHODS`, a class of your own or "my_file.py:Class",
    with keyword arguments in `position_options`. Or `position` is a `Position` that several layers
    share, and `layer` is the number of this layer. Layers that share a position may share a cache
    too; other layers need one each. `window` is how far a query sees to both sides, None is without
    limit. `sinks` gives each head's softmax a learned logit that no token has.

    A method that enters at the input embeddings enters at this layer's input if the method was
    given by name. A shared `Position` is put there by the transformer (`position.embed`).
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        *,
        position: Given | Position = "tisa",
        position_options: Mapping[str, Any] | None = None,
        layer: int = 0,
        is_causal: bool = False,
        max_position_embeddings: int = 512,
        attention_dropout: float = 0.0,
        window: int | None = None,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        check_flags("SelfAttention", is_causal=is_causal, sinks=sinks)
        self.embeds = not isinstance(position, Position)
        if not isinstance(position, Position):
            if layer != 0:
                raise ValueError(
                    f"SelfAttention: layer must be 0 where position is no module, got {layer}; "
                    "a number is for layers that share one position: pass the Position"
                )
            config = PositionConfig(
                hidden_size=hidden_size,
                num_attention_heads=num_attention_heads,
                num_hidden_layers=1,
                max_position_embeddings=max_position_embeddings,
                is_causal=is_causal,
                options=dict(position_options or {}),
            )
            position = build_position(position, config)
        elif position_options:
            raise ValueError(
                "SelfAttention: position_options must be None where position is a module, got "
                f"{dict(position_options)}; pass them when you build it"
            )
        sizes = (position.config.hidden_size, position.config.num_attention_heads)
        if sizes != (hidden_size, num_attention_heads):
            raise ValueError(
                f"SelfAttention: position must be made for hidden_size {hidden_size} and "
                f"num_attention_heads {num_attention_heads}, got {sizes[0]} and {sizes[1]}"
            )
        if position.config.is_causal != is_causal:
            # T5's buckets and TUPE's special first token are other ones in a decoder.
            raise ValueError(
                f"SelfAttention: position must be made for is_causal={is_causal}, got "
                f"{position.config.is_causal}; it is set in its PositionConfig"
            )
        if not 0 <= layer < position.config.num_hidden_layers:
            raise ValueError(
                f"SelfAttention: layer must lie in 0 … {position.config.num_hidden_layers - 1} "
                f"(the position method's num_hidden_layers), got {layer}"
            )
        self.position = position
        self.layer = layer
        layers = position.config.num_hidden_layers
        self.windows = windows_of(checked_window(window, layers), layers)
        method, _ = position.member(layer)
        self.attention = AttentionLayer(
            hidden_size,
            num_attention_heads,
            uses_content=method.uses_content,
            biases=method.biases,
            is_causal=is_causal,
            attention_dropout=attention_dropout,
            sinks=sinks,
        )

    def forward(
        self,
        hidden: Float[Tensor, "*batch tokens hidden"],
        *,
        attention_mask: Bool[Tensor, "batch keys"] | Int[Tensor, "batch keys"] | None = None,
        cache: Cache | None = None,
        cu_seqlens: Int32[Tensor, " ends"] | None = None,
        max_seqlen: int | None = None,
    ) -> Float[Tensor, "*batch tokens hidden"]:
        """Return the attention's output, of the shape of its input.

        Args:
            hidden: (batch, length, hidden), or (total, hidden) for a packed batch.
            attention_mask: True (or 1) for tokens, False (or 0) for padding; with a cache it
                covers the tokens in the cache too.
            cache: what earlier calls have seen; these tokens come after them and are added to it.
            cu_seqlens: a packed batch: the ends of the sequences, after a leading 0.
            max_seqlen: length of the longest packed sequence.
        """
        run = begin(
            self.position,
            hidden,
            layer=self.layer,
            is_causal=self.attention.is_causal,
            attention_mask=attention_mask,
            cache=cache,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            windows=self.windows,
        )
        if self.embeds:
            hidden = self.position.embed(hidden, run.prepared)
        return self.attention(hidden, self.position, self.layer, run)

    def logits(
        self, hidden: Float[Tensor, "batch tokens hidden"]
    ) -> Float[Tensor, "batch heads queries keys"]:
        """Return the logits of every pair before masks, as a dense tensor to look at."""
        prepared = self.position.prepare(places_of(hidden.shape[1], hidden.device))
        if self.embeds:
            hidden = self.position.embed(hidden, prepared)
        return self.attention.logits(hidden, self.position, self.layer, prepared)
