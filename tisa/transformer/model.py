"""Token ids in, hidden states out: an encoder, or a causal decoder with a cache."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tisa.ops.ring import Ring
from tisa.positions import Position, build_position
from tisa.shapes import Bool, Float, Int, Int32, Tensor
from tisa.transformer.attention import AttentionLayer
from tisa.transformer.cache import Cache
from tisa.transformer.config import TransformerConfig
from tisa.transformer.forward_pass import ForwardPass, begin


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)); post-norm: norm(x + …) each time."""

    def __init__(self, config: TransformerConfig, position: Position, layer: int) -> None:
        super().__init__()
        position, _ = position.member(layer)
        self.post_norm = config.norm == "post"
        self.attention = AttentionLayer(
            config.hidden_size,
            config.num_attention_heads,
            uses_content=position.uses_content,
            biases=position.biases,
            is_causal=config.is_causal,
            attention_dropout=config.attention_dropout,
            sinks=config.sinks,
        )
        self.feed_forward = nn.Sequential(
            nn.Linear(config.hidden_size, config.feed_forward_size),
            nn.GELU(),
            nn.Linear(config.feed_forward_size, config.hidden_size),
        )
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden: Float[Tensor, "*batch tokens hidden"],
        position: Position,
        layer: int,
        run: ForwardPass,
    ) -> Float[Tensor, "*batch tokens hidden"]:
        """Return the hidden states after this layer."""
        if self.post_norm:
            mixed = self.dropout(self.attention(hidden, position, layer, run))
            hidden = self.attention_norm(hidden + mixed)
            return self.feed_forward_norm(hidden + self.dropout(self.feed_forward(hidden)))
        mixed = self.attention(self.attention_norm(hidden), position, layer, run)
        hidden = hidden + self.dropout(mixed)
        return hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))


class Transformer(nn.Module):
    """Embeddings, blocks and norms of `config`; the position method is `position`, one for all.

    Pre-norm: a norm after the last block. Post-norm: a norm after the embeddings.
    `activation_checkpointing` (an attribute, off) recomputes each block in the backward pass.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        self.embeddings = nn.Embedding(config.vocab_size, config.embedding_width)
        self.widen = (
            None
            if config.embedding_size is None
            else nn.Linear(config.embedding_width, config.hidden_size)
        )
        self.position = build_position(config.position, config.position_config())
        distinct = 1 if config.share_layers else config.num_hidden_layers
        members = [self.position.member(n)[0] for n in range(config.num_hidden_layers)]
        if distinct == 1 and len({(m.uses_content, m.biases) for m in members}) > 1:
            raise ValueError(
                "share_layers must be False where methods of a mixture have other maps to queries "
                f"and keys, or biases, got {config.position}"
            )
        self.blocks = nn.ModuleList(Block(config, self.position, n) for n in range(distinct))
        normed = config.embedding_width if config.norm == "post" else config.hidden_size
        self.norm = nn.LayerNorm(normed, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial values for everything but the position method, which has its own."""
        initialise(self.embeddings, self.config.initializer_range)
        initialise(self.blocks, self.config.initializer_range)
        if self.widen is not None:
            initialise(self.widen, self.config.initializer_range)
        self.norm.reset_parameters()

    def forward(
        self,
        input_ids: Int[Tensor, "*batch tokens"] | None = None,
        *,
        inputs_embeds: Float[Tensor, "*batch tokens width"] | None = None,
        attention_mask: Bool[Tensor, "batch keys"] | Int[Tensor, "batch keys"] | None = None,
        cache: Cache | None = None,
        cu_seqlens: Int32[Tensor, " ends"] | None = None,
        max_seqlen: int | None = None,
        ring: Ring | None = None,
    ) -> Float[Tensor, "*batch tokens hidden"]:
        """Return the hidden states of every token.

        Args:
            input_ids: (batch, length) token ids, or (total) in a packed batch.
            inputs_embeds: token embeddings instead of ids.
            attention_mask: True (or 1) for tokens, False (or 0) for padding, which methods that
                count positions from the start need on the right; with a cache it covers the tokens
                in the cache too.
            cache: what earlier calls of a decoder have seen; these tokens are added to it.
            cu_seqlens: a packed batch: the ends of the sequences, after a leading 0; tokens see
                their own sequence only.
            max_seqlen: length of the longest packed sequence.
            ring: the tokens are this process's part of longer sequences, which the processes of a
                `tisa.ops.ring.Ring` hold together.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                "input_ids or inputs_embeds must be given, and not both, got "
                f"{'neither' if input_ids is None else 'both'}"
            )
        hidden = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        run = begin(
            self.position,
            hidden,
            is_causal=self.config.is_causal,
            attention_mask=attention_mask,
            cache=cache,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            ring=ring,
            windows=self.config.windows,
        )
        hidden = self.position.embed(hidden, run.prepared)
        if self.config.norm == "post":
            hidden = self.norm(hidden)
        hidden = self.dropout(hidden)
        if self.widen is not None:
            hidden = self.widen(hidden)
        for layer in range(self.config.num_hidden_layers):
            block = self.blocks[layer % len(self.blocks)]
            if self.activation_checkpointing and torch.is_grad_enabled() and cache is None:
                hidden = checkpoint(block, hidden, self.position, layer, run, use_reentrant=False)
            else:
                hidden = block(hidden, self.position, layer, run)
        return hidden if self.config.norm == "post" else self.norm(hidden)

    def num_parameters(self) -> tuple[int, int]:
        """Return the number of positional parameters and of all other parameters."""
        positional = sum(p.numel() for p in self.position.parameters())
        return positional, sum(p.numel() for p in self.parameters()) - positional


def initialise(module: nn.Module, deviation: float) -> None:
    """Draw weights, embeddings and sinks from N(0, deviation), biases 0, norms 1 and 0."""
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            nn.init.normal_(part.weight, std=deviation)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
        if isinstance(part, AttentionLayer) and part.sinks is not None:
            nn.init.normal_(part.sinks, std=deviation)
        if isinstance(part, nn.LayerNorm):
            part.reset_parameters()
