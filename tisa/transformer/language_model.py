"""A transformer with a head that is tied to its embeddings: masked or causal language model."""

import torch
from torch import nn
from torch.nn.functional import gelu, linear

from tisa.ops.ring import Ring
from tisa.shapes import Bool, Float, Int, Int32, Tensor
from tisa.transformer.cache import Cache
from tisa.transformer.config import TransformerConfig
from tisa.transformer.model import Transformer, initialise


class LanguageModel(nn.Module):
    """`transformer`, and logits of the vocabulary from its hidden states.

    The weights of the last map are the input embeddings. Encoders have BERT's head before it (a
    linear map, GELU, a norm), decoders only the map that a smaller `embedding_size` needs.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        masked = not config.is_causal
        self.narrow = (
            nn.Linear(config.hidden_size, config.embedding_width)
            if masked or config.embedding_size is not None
            else None
        )
        self.norm = (
            nn.LayerNorm(config.embedding_width, eps=config.layer_norm_eps) if masked else None
        )
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        if self.narrow is not None:
            initialise(self.narrow, config.initializer_range)

    def forward(
        self,
        input_ids: Int[Tensor, "*batch tokens"],
        *,
        attention_mask: Bool[Tensor, "batch keys"] | Int[Tensor, "batch keys"] | None = None,
        cache: Cache | None = None,
        cu_seqlens: Int32[Tensor, " ends"] | None = None,
        max_seqlen: int | None = None,
        ring: Ring | None = None,
    ) -> Float[Tensor, "*batch tokens vocabulary"]:
        """Return the logits of every token; the arguments are those of `Transformer`.

        Where few tokens have a label, `head(transformer(…)[labelled])` makes only theirs.
        """
        return self.head(
            self.transformer(
                input_ids,
                attention_mask=attention_mask,
                cache=cache,
                cu_seqlens=cu_seqlens,
                max_seqlen=max_seqlen,
                ring=ring,
            )
        )

    def head(self, hidden: Float[Tensor, "*any hidden"]) -> Float[Tensor, "*any vocabulary"]:
        """Return the logits of the vocabulary for hidden states."""
        if self.narrow is not None:
            hidden = self.narrow(hidden)
        if self.norm is not None:
            hidden = self.norm(gelu(hidden))
        return linear(hidden, self.transformer.embeddings.weight, self.bias)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Int[Tensor, "batch length"],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Int[Tensor, "batch longer"]:
        """Return the input with that many tokens after it, each from a cache of those before.

        The most likely token at temperature 0, else one drawn from softmax(logits / temperature).
        """
        if not self.config.is_causal:
            raise ValueError("generate needs a decoder: build the model with is_causal=True")
        if input_ids.ndim != 2 or input_ids.shape[1] == 0:
            raise ValueError(
                "input_ids must be (batch, length) with at least one token to continue, got shape "
                f"{tuple(input_ids.shape)}"
            )
        if temperature < 0:
            raise ValueError(f"temperature must be 0 or more, got {temperature}")
        cache, new = Cache(), input_ids
        for _ in range(max_new_tokens):
            logits = self.head(self.transformer(new, cache=cache)[:, -1])
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)
            else:
                weights = (logits.float() / temperature).softmax(-1)
                new = torch.multinomial(weights, 1, generator=generator)
            input_ids = torch.cat((input_ids, new), dim=1)
        return input_ids
