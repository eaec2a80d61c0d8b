"""BLOOM, MPT and Falcon with ALiBi: slopes by the offset, in attention code of their own.

Stock code adds slope · place of the key. From slope · (key − query), which the operator is given,
that differs by one number in a row of logits, which the softmax does not see. It does see holes:
BLOOM and Falcon count only tokens that are not hidden, so a key after a hole has a lower place.
Such keys are corrected in the mask, (batch, heads, 1, keys). MPT counts all tokens.

What stock code rounds is not rounded here: Falcon's slopes and slope · place to bfloat16 in any
dtype, which after 256 tokens is wrong by whole places, BLOOM's to the model's dtype. Falcon's
"eager" attention, which stock code also takes where weights are asked for, adds ALiBi twice. A
fused Falcon is the "sdpa" one, which adds it once, and so are its weights.

That they are fused, attention modules are told by an ALiBi without entries: most have no config
(Falcon's has). What is hidden they are told in the mask, which has 1 for a token in uint8 (MPT's
stock code makes it boolean), (batch, 1, 1, keys), and no keys at all where nothing is hidden.
"""

import math
from typing import Any

import torch
from torch.nn.functional import dropout, pad

from tisa.hf.core import Mixed
from tisa.hf.fused.attention import NAME, PADDING, Told, seen, told
from tisa.offsets import offset_range
from tisa.ops import attention
from tisa.shapes import Float, Tensor


class Sloped(Mixed):
    """Mixin: a module that knows its heads' slopes."""

    @property
    def divisor(self) -> float:
        """Return what stock code divides ALiBi by."""
        return 1.0

    def slopes(self, like: Tensor) -> Float[Tensor, " heads"]:
        """Return each head's slope by stock code's own formula, in float32 or a wider dtype."""
        known: Tensor | None = self.__dict__.get("known_slopes")
        if known is None or known.device != like.device:
            known = self.stock_slopes(like.device)
            # What a compiled program made may be in memory that its next run writes to.
            if not torch.compiler.is_compiling():
                self.__dict__["known_slopes"] = known
        return known.to(torch.promote_types(like.dtype, torch.float32)) / self.divisor


class SlopedModel(Sloped):
    """Mixin: the model, which makes the mask: no dense one, and no dense ALiBi."""

    # Whether stock code counts only tokens that are not hidden.
    counts_visible = True

    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return what the stock model does."""
        if self.config._attn_implementation == NAME:
            if not getattr(self.config, "is_causal", True):
                raise ValueError(
                    f"config.is_causal: a fused {type(self).__name__} sees no later tokens, got "
                    "False; take the stock model, which tisa.hf.unfuse gives back"
                )
            weight = self.get_input_embeddings().weight
            attention_mask = self.hidden(attention_mask, weight)
        return super().forward(input_ids, past_key_values, attention_mask, *args, **kwargs)

    def hidden(self, mask: Tensor | None, like: Tensor) -> Tensor:
        """Return what is hidden, as attention modules are told it."""
        nothing = torch.ones(1, 1, 1, 0, dtype=PADDING, device=like.device)
        if mask is None:
            return nothing
        if mask.ndim == 4 and mask.dtype == PADDING and mask.shape[1:3] == (1, 1):
            # What `generate` has had made for a static cache.
            mask = mask[:, 0, 0]
        if mask.ndim != 2:
            raise ValueError(
                f"attention_mask: a fused {type(self).__name__} takes (batch, keys), 1 for a token "
                f"and 0 for padding, got shape {tuple(mask.shape)}; give it that, or take the "
                "stock model, which tisa.hf.unfuse gives back"
            )
        real = mask.to(like.device).bool()
        apart = True
        if not torch.compiler.is_compiling():
            begins = (real[:, 1:] & ~real[:, :-1]).sum(-1) + real[:, 0]
            whole, apart = torch.stack([real.all(), (begins > 1).any()]).tolist()
            if whole:
                return nothing
        if not (apart and self.counts_visible):
            return real[:, None, None, :].to(PADDING)
        too_far = real.cumsum(-1) - 1 - torch.arange(real.shape[-1], device=real.device)
        moved = self.slopes(like)[None, :, None, None] * too_far[:, None, None, :]
        return moved.masked_fill(~real[:, None, None, :], float("-inf"))

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a stock model."""
        return cls.stock.from_pretrained(*args, **kwargs)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # transformers asks a class's file, which here is not the stock one.
        return bool(cls.stock._can_set_attn_implementation())


class SlopedAttention(Sloped):
    """Mixin: an attention module on the operator; in a model that is not fused the stock module."""

    above: type = SlopedModel

    def attended(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, known: Told, p: float,
        scale: float,
    ) -> Float[Tensor, "batch queries heads_dim"]:  # fmt: skip
        """Return the operator's output, the heads side by side."""
        queries, keys = query.shape[-2], key.shape[-2]
        offsets = offset_range(queries, keys, query_start=known.query_start, device=query.device)
        output = attention(
            query, key, value, self.slopes(query)[:, None] * offsets, attn_mask=_of(mask, keys),
            is_causal=True, query_start=known.query_start, scale=scale,
            dropout_p=p if self.training else 0.0, enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        assert isinstance(output, Tensor)
        return output.transpose(1, 2).flatten(-2)

    def stock_form(
        self, hidden_states: Tensor, mask: Tensor, past: Any, known: Told
    ) -> tuple[Tensor, Tensor]:
        """Return ALiBi, (heads, 1, keys), and a dense mask that is added, both as in stock code.

        For attention weights, which stock code makes of them.
        """
        keys, dtype = hidden_states.shape[1], hidden_states.dtype
        if past is not None:
            keys, _ = past.get_mask_sizes(keys, self.layer_idx)
        visible = _of(mask, keys)
        added = visible if visible is not None and visible.is_floating_point() else None
        real = None if visible is None or added is not None else visible.to(PADDING)
        like = hidden_states.new_empty(keys, 0)
        whole = seen(hidden_states, like, real, Told(causal=True, query_start=known.query_start))
        assert whole is not None
        if added is not None:
            whole = (whole + added.to(dtype)).clamp_min(torch.finfo(dtype).min)
        places = torch.arange(1 - keys, 1, device=hidden_states.device)
        return (self.slopes(hidden_states)[:, None] * places).unsqueeze(1).to(dtype), whole


def _of(mask: Tensor, keys: int) -> Tensor | None:
    """Return a mask for the operator; a static cache is longer than what has been seen."""
    if mask.shape[-1] == 0:
        return None
    mask = mask if mask.is_floating_point() else mask.bool()
    lacking = keys - mask.shape[-1]
    return pad(mask, (0, lacking)) if lacking > 0 else mask


class BloomSlopes(Sloped):
    """Mixin: BLOOM's slopes."""

    def stock_slopes(self, device: torch.device) -> Float[Tensor, " heads"]:
        """Return them."""
        from transformers.models.bloom.modeling_bloom import build_alibi_tensor

        two = torch.ones(1, 2, dtype=torch.long, device=device)
        return build_alibi_tensor(two, self.num_heads, torch.float32)[:, 0, 1]


class BloomModelFused(BloomSlopes, SlopedModel):
    """Mixin: BLOOM."""

    @staticmethod
    def against(module: Any) -> str | None:
        """Return why a model of stock class cannot be fused."""
        return _slow(module.config)

    def build_alibi_tensor(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return nothing where attention modules know their slopes."""
        if self.config._attn_implementation == NAME:
            return torch.empty(0, device=args[0].device)
        alibi: Tensor = self.stock.build_alibi_tensor(self, *args, **kwargs)
        return alibi


class BloomFused(BloomSlopes, SlopedAttention):
    """Mixin: BLOOM's attention."""

    above = BloomModelFused

    @staticmethod
    def against(module: Any) -> str | None:
        """Return why a module of stock class cannot be fused."""
        return _slow(module)

    def forward(
        self, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Any,
        layer_past: Any = None, use_cache: bool = False, output_attentions: bool = False,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Return the output, and the weights if they are asked for."""
        if alibi.numel() == 0:
            known = told(self, True, False, (layer_past,), {})
            if not output_attentions:
                query, key, value = self._reshape(self.query_key_value(hidden_states))
                if layer_past is not None:
                    key, value = layer_past.update(key, value, self.layer_idx)
                p, scale = self.attention_dropout.p, self.inv_norm_factor
                output = self.attended(query, key, value, attention_mask, known, p, scale)
                output = dropout(self.dense(output), self.hidden_dropout, self.training)
                return residual + output, None
            alibi, attention_mask = self.stock_form(
                hidden_states, attention_mask, layer_past, known
            )
            alibi = alibi.repeat(len(hidden_states), 1, 1)
        return super().forward(
            hidden_states, residual, alibi, attention_mask, layer_past, use_cache,
            output_attentions, **kwargs,
        )  # fmt: skip


def _slow(holder: Any) -> str | None:
    slow = holder.pretraining_tp > 1 and holder.slow_but_exact
    return "its config asks for slow_but_exact sums; set it to False before loading" * slow or None


class MptSlopes(Sloped):
    """Mixin: MPT's slopes."""

    def stock_slopes(self, device: torch.device) -> Float[Tensor, " heads"]:
        """Return them."""
        from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

        heads = self.n_heads if hasattr(self, "n_heads") else self.num_heads
        return -build_mpt_alibi_tensor(heads, 2, device=device)[:, 0, 0]


class MptModelFused(MptSlopes, SlopedModel):
    """Mixin: MPT."""

    counts_visible = False

    def build_mpt_alibi_tensor(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return nothing where attention modules know their slopes."""
        if self.config._attn_implementation == NAME:
            return torch.empty(0, device=kwargs.get("device"))
        alibi: Tensor = self.stock.build_mpt_alibi_tensor(self, *args, **kwargs)
        return alibi


class MptBlockFused(Mixed):
    """Mixin: MPT's layer, which stock code does not let tell its attention of weights."""

    above = MptModelFused

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        attention_mask: Tensor,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return what the stock layer does."""
        if output_attentions and position_bias.numel() == 0:
            position_bias = position_bias.view(1, 0)
        return super().forward(
            hidden_states, position_bias, attention_mask, layer_past, use_cache,
            output_attentions, **kwargs,
        )  # fmt: skip


class MptFused(MptSlopes, SlopedAttention):
    """Mixin: MPT's attention."""

    above = MptModelFused

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        past_key_values: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return the output, and the weights if its layer has asked for them."""
        if position_bias.numel() == 0:
            known = told(self, True, False, (past_key_values,), {})
            if position_bias.ndim == 1:
                mixed = self.Wqkv(hidden_states)
                if self.clip_qkv:
                    mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
                shape = (*hidden_states.shape[:2], self.n_heads, self.head_dim)
                query, key, value = (
                    part.reshape(shape).transpose(1, 2) for part in mixed.chunk(3, dim=2)
                )
                if past_key_values is not None:
                    key, value = past_key_values.update(key, value, self.layer_idx)
                p, scale = self.attn_dropout_p, self.softmax_scale
                output = self.attended(query, key, value, attention_mask, known, p, scale)
                return self.out_proj(output), None
            position_bias, added = self.stock_form(
                hidden_states, attention_mask, past_key_values, known
            )
            attention_mask = added < 0
        return super().forward(
            hidden_states, position_bias, past_key_values, attention_mask, **kwargs
        )


class FalconSlopes(BloomSlopes):
    """Mixin: Falcon's slopes: BLOOM's, added to logits before those are divided."""

    @property
    def divisor(self) -> float:
        """Return the root of a head's width."""
        return math.sqrt(self.config.hidden_size // self.num_heads)


class FalconModelFused(FalconSlopes, SlopedModel):
    """Mixin: Falcon."""

    @staticmethod
    def against(module: Any) -> str | None:
        """Return why a model of stock class cannot be fused."""
        return _not_alibi(module)

    @property
    def use_alibi(self) -> bool:
        """Return whether stock code makes ALiBi, and a dense mask with it."""
        return bool(self.config.alibi) and self.config._attn_implementation != NAME


class FalconFused(FalconSlopes, SlopedAttention):
    """Mixin: Falcon's attention."""

    above = FalconModelFused

    @staticmethod
    def against(module: Any) -> str | None:
        """Return why a module of stock class cannot be fused."""
        return _not_alibi(module)

    def forward(
        self, hidden_states: Tensor, alibi: Tensor | None, attention_mask: Any,
        position_ids: Any = None, layer_past: Any = None, use_cache: bool = False,
        output_attentions: bool = False, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Return the output, and the weights if they are asked for."""
        if self.config._attn_implementation == NAME:
            known = told(self, True, False, (layer_past,), {})
            if not output_attentions:
                query, key, value = (
                    part.transpose(1, 2)
                    for part in self._split_heads(self.query_key_value(hidden_states))
                )
                if layer_past is not None:
                    key, value = layer_past.update(key, value, self.layer_idx)
                p, scale = self.attention_dropout.p, self.inv_norm_factor
                output = self.attended(query, key, value, attention_mask, known, p, scale)
                return self.dense(output), None
            alibi, attention_mask = self.stock_form(
                hidden_states, attention_mask, layer_past, known
            )
            # Stock code divides it, and has it for every row.
            alibi = (alibi * self.divisor).repeat(len(hidden_states), 1, 1)
        return super().forward(
            hidden_states, alibi, attention_mask, position_ids, layer_past, use_cache,
            output_attentions, *args, **kwargs,
        )  # fmt: skip


def _not_alibi(module: Any) -> str | None:
    if not module.config.alibi:
        return (
            "its positions are rotary (config.alibi is False): they turn queries and keys, and "
            "are no scores of the offset"
        )
    kinds = {type(m).__name__ for m in module.modules()}
    implementation = module.config._attn_implementation
    if "FalconFlashAttention2" in kinds or implementation not in ("sdpa", "tisa", NAME):
        return (
            f'its attention implementation is "{implementation}", in which ALiBi is added twice '
            '("eager") or not at all; load it with attn_implementation="sdpa"'
        )
    return None
