"""T5's attention and its kin's: the score vector travels where the dense bias did.

The first layer (UMT5: each) makes `position_bias`, stock code hands it from layer to layer, and
the attention function gets it beside queries and keys. Here it is the vector of `tisa.offsets`,
(heads, queries + keys − 1), made by stock code's own buckets; cross-attention has an empty one.
"""

import math
from typing import Any

import torch
from torch import nn

from tisa.hf.core import Mixed
from tisa.hf.fused.attention import NAME, told
from tisa.offsets import offset_range
from tisa.scoring.t5 import by_bucket
from tisa.shapes import Int, Tensor


class T5Fused(Mixed):
    """Mixin: an attention module with T5's table of buckets, or none, on the operator.

    With any other implementation than "tisa-fused" it is the stock module.
    """

    relative_attention_bias: nn.Embedding

    @property
    def has_relative_attention_bias(self) -> bool:
        """Return whether stock code asks for a bias, and does not make dense zeros by itself."""
        return self._fused or "relative_attention_bias" in self._modules

    @property
    def _fused(self) -> bool:
        return bool(self.config._attn_implementation == NAME)

    @property
    def bidirectional(self) -> bool:
        """Return whether buckets tell what comes after a query apart: in encoders."""
        # Pix2Struct's has no word for it, and is a decoder.
        return not getattr(self, "is_decoder", True)

    @property
    def band_ends(self) -> tuple[int, int]:
        """Return the offsets from which on the last buckets hold all the rest."""
        number = self.relative_attention_num_buckets // (1 + self.bidirectional)
        exact, farthest = number // 2, self.relative_attention_max_distance
        last = exact * (farthest / exact) ** (1 - 1 / (number - exact))
        # Stock code takes logarithms in float32, and may be one offset late.
        end = math.ceil(last) + 1
        return -end, end if self.bidirectional else 0

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the stock module does; tell the attention function what it is not told."""
        if self._fused:
            others = kwargs.get("key_value_states"), kwargs.get("encoder_hidden_states")
            cross = any(other is not None for other in (*others, *args[1:2]))
            causal = not (self.bidirectional or cross)
            kwargs["tisa_told"] = told(self, causal, cross, args, kwargs)
        return super().forward(hidden_states, *args, **kwargs)

    def compute_bias(
        self, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0
    ) -> Tensor:
        """Return the score vector; empty for attention to other tokens, which has no positions."""
        if not self._fused:
            return self.stock.compute_bias(self, query_length, key_length, device, past_seen_tokens)
        if "relative_attention_bias" not in self._modules:
            return torch.empty(0, 0, device=device)
        table = self.relative_attention_bias
        device = table.weight.device if device is None else device
        # Called, not read: accelerate and peft wrap it. In float32, so that gradients are summed
        # before they are rounded.
        rows = table(torch.arange(table.num_embeddings, device=device))
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        offsets = offset_range(
            query_length, key_length, query_start=past_seen_tokens, device=device
        )
        return by_bucket(rows.T, self.buckets(offsets))

    def buckets(self, offsets: Int[Tensor, " span"]) -> Int[Tensor, " span"]:
        """Return each offset's bucket, as stock code has it."""
        found: Tensor = self._relative_position_bucket(
            offsets, self.bidirectional, self.relative_attention_num_buckets,
            self.relative_attention_max_distance,
        )  # fmt: skip
        return found


class UMT5Fused(T5Fused):
    """Mixin: UMT5's attention, whose layers have a table each."""

    def buckets(self, offsets: Int[Tensor, " span"]) -> Int[Tensor, " span"]:
        """Return each offset's bucket, as stock code has it."""
        found: Tensor = self._relative_position_bucket(offsets)
        return found
