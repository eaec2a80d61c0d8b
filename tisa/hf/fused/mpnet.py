"""MPNet's attention: one table of buckets, beside absolute positions, for all layers.

The encoder makes the position bias, and hands it from layer to layer. Here it is the score vector
of `tisa.offsets`, (heads, queries + keys − 1), made by stock code's own buckets.
"""

from typing import Any

import torch
from torch import nn

from tisa.hf.core import Mixed
from tisa.hf.fused.attention import NAME, PADDING, Told, attend, seen
from tisa.offsets import offset_range, to_matrix
from tisa.scoring.t5 import by_bucket
from tisa.shapes import Int, Tensor


class MPNetEncoderFused(Mixed):
    """Mixin: the encoder, which makes the score vector; with another name the stock encoder."""

    relative_attention_bias: nn.Embedding

    @staticmethod
    def against(module: Any) -> str | None:
        """Return why an encoder of stock class cannot be fused."""
        if hasattr(module.config, "tisa"):
            return "it has been converted by tisa.hf.convert, and is on the operator already"
        return None

    def compute_position_bias(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the score vector."""
        if self.config._attn_implementation != NAME:
            dense: Tensor = self.stock.compute_position_bias(self, x, *args, **kwargs)
            return dense
        table, length = self.relative_attention_bias, x.shape[1]
        # Called, not read: accelerate and peft wrap it. In float32, so that gradients are summed
        # before they are rounded.
        rows = table(torch.arange(table.num_embeddings, device=x.device))
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        offsets = offset_range(length, length, device=x.device)
        return by_bucket(rows.T, self.buckets(offsets))

    def buckets(self, offsets: Int[Tensor, " span"]) -> Int[Tensor, " span"]:
        """Return each offset's bucket, as stock code has it: whatever the config says, of 32."""
        found: Tensor = self.relative_position_bucket(offsets)
        return found


class MPNetFused(Mixed):
    """Mixin: an attention module; given a dense bias it is the stock module."""

    # The last buckets hold all from 8 · 16^(7/8) = 90.5 on, where a logarithm in float32 may be
    # one offset late.
    band_ends = -92, 92

    above = MPNetEncoderFused

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return the output in a tuple, and the weights with it if they are asked for."""
        if position_bias is None or position_bias.ndim != 2:
            return super().forward(
                hidden_states, attention_mask, position_bias, output_attentions, **kwargs
            )
        if attention_mask is not None and not (
            attention_mask.dtype == PADDING or attention_mask.is_floating_point()
        ):
            raise ValueError(
                "attention_mask: MPNet adds a mask of four dimensions to its logits, which for "
                f"{attention_mask.dtype} is not to hide; give zeros and torch.finfo(dtype).min"
            )
        if output_attentions:
            # In stock code, which has the weights, with the dense bias that it knows.
            length, dtype = hidden_states.shape[1], hidden_states.dtype
            bias = to_matrix(position_bias, length, length).to(dtype).unsqueeze(0)
            hidden = seen(hidden_states, hidden_states, attention_mask, Told(causal=False))
            return super().forward(hidden_states, hidden, bias, True, **kwargs)
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        query, key, value = (
            linear(hidden_states).view(shape).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        output, _ = attend(
            self, query, key, value, attention_mask, position_bias=position_bias,
            dropout=self.dropout.p if self.training else 0.0, tisa_told=Told(causal=False),
        )  # fmt: skip
        return (self.o(output.flatten(-2)),)
