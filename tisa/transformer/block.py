"""One layer of a transformer: attention and feed-forward, pre-norm or post-norm."""

from torch import nn

from tisa.positions import Position
from tisa.shapes import Float, Tensor
from tisa.transformer.attention import AttentionLayer
from tisa.transformer.config import TransformerConfig
from tisa.transformer.forward_pass import ForwardPass


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)); post-norm: norm(x + …) each time."""

    def __init__(self, config: TransformerConfig, *, uses_content: bool) -> None:
        super().__init__()
        self.post_norm = config.norm == "post"
        self.attention = AttentionLayer(
            config.hidden_size,
            config.num_attention_heads,
            uses_content=uses_content,
            is_causal=config.is_causal,
            attention_dropout=config.attention_dropout,
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
