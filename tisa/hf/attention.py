"""The functions that transformers' attention interface calls, registered under names of our own.

A converted attention module owns its scores and always comes here, whichever implementation its
model is set to (`modules.OwnScores`): "eager" and "sdpa" are transformers' own functions with the
scores added to their mask, "flex_attention" reads the score vector in its `score_mod`, and "tisa",
which is the default, hands the vector to `tisa.attention`: no dense bias, fused on a GPU.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations.flex_attention import compile_friendly_flex_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from tisa.offsets import offset_range, to_matrix
from tisa.ops import attention
from tisa.shapes import Bool, Float, Int, Int32, Tensor

# Implementations a model may be set to, and the name under which its own modules look them up.
IMPLEMENTATIONS = {
    "tisa": "tisa",
    "eager": "tisa|eager",
    "sdpa": "tisa|sdpa",
    "flex_attention": "tisa|flex_attention",
}

Attended = tuple[Tensor, Tensor | None]


def own_name(implementation: str | None) -> str:
    """Return the name of our function for a model's attention implementation, or refuse it."""
    chosen = "tisa" if implementation is None else implementation
    if chosen not in IMPLEMENTATIONS:
        raise ValueError(
            f'attn_implementation: "{chosen}" would ignore the position scores of this model; '
            f"take one of {', '.join(IMPLEMENTATIONS)}"
        )
    return IMPLEMENTATIONS[chosen]


def register() -> None:
    """Make the functions known to transformers, each with its mask: without one there is none."""
    for name, function in (
        ("tisa", _ours),
        ("tisa|eager", _eager),
        ("tisa|sdpa", _sdpa),
        ("tisa|flex_attention", _flex),
    ):
        AttentionInterface.register(name, function)
    AttentionMaskInterface.register("tisa", sdpa_mask)


def same_segment(segments: Int[Tensor, "batch length"]) -> Bool[Tensor, "batch 1 length length"]:
    """Return which query may see which key of the same packed sequence."""
    return (segments.unsqueeze(-1) == segments.unsqueeze(-2)).unsqueeze(1)


def packed_segments(ends: Int32[Tensor, " ends"], length: int) -> Int[Tensor, "1 length"]:
    """Return the number of each token's sequence from where packed sequences begin and end."""
    places = torch.arange(length, device=ends.device)
    return torch.bucketize(places, ends[1:], right=True).unsqueeze(0)


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask that is added to the logits from one that may be boolean."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)


def _ours(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> Attended:
    if not hasattr(module, "offset_scores"):
        # Cross-attention, or a layer beside the converted ones: no positions of ours.
        causal = _is_causal(module, query, attention_mask, kwargs)
        output = attention(
            query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling,
            is_causal=causal, enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        assert isinstance(output, Tensor)
        return output.transpose(1, 2).contiguous(), None
    if kwargs.get("tisa_weights"):
        return _eager(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    _observe(module, query, key, attention_mask, scaling, kwargs)
    queries, keys = query.shape[-2], key.shape[-2]
    start = kwargs.get("tisa_query_start")
    packed = kwargs.get("tisa_packed")
    if attention_mask is not None or query.shape[0] != 1:
        # Packed sequences, and something else that says who sees whom.
        packed = None
    segments = None if packed is not None else _segments(kwargs, queries, keys)
    causal = _is_causal(module, query, attention_mask, kwargs)
    gqa = query.shape[1] != key.shape[1]
    if segments is not None:
        packed = _packed(segments, query, attention_mask)
    if packed is not None:
        ends, longest = packed
        output = attention(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            module.score_vector(longest, longest, kwargs),
            cu_seqlens=ends, max_seqlen=longest, dropout_p=dropout, scale=scaling,
            is_causal=causal, enable_gqa=gqa, band=module.band(query, longest, kwargs),
        )  # fmt: skip
        assert isinstance(output, Tensor)
        return output.unsqueeze(0).contiguous(), None
    if segments is not None:
        same = same_segment(segments)
        if attention_mask is None:
            attention_mask = same
        elif attention_mask.dtype == torch.bool:
            attention_mask = attention_mask & same
        else:
            hidden = torch.finfo(attention_mask.dtype).min
            attention_mask = attention_mask.masked_fill(~same, hidden)
    output = attention(
        query, key, value, module.score_vector(queries, keys, kwargs),
        attn_mask=attention_mask, dropout_p=dropout, scale=scaling, is_causal=causal,
        enable_gqa=gqa, query_start=start, band=module.band(query, keys, kwargs),
    )  # fmt: skip
    assert isinstance(output, Tensor)
    return output.transpose(1, 2).contiguous(), None


def _eager(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> Attended:
    _observe(module, query, key, attention_mask, scaling, kwargs)
    biased = _biased_mask(module, query, key, attention_mask, kwargs)
    return _stock_eager(module)(
        module, query, key, value, biased, dropout=dropout, scaling=scaling, **kwargs
    )


def _sdpa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> Attended:
    if kwargs.get("tisa_weights"):
        return _eager(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    _observe(module, query, key, attention_mask, scaling, kwargs)
    biased = _biased_mask(module, query, key, attention_mask, kwargs)
    return sdpa_attention_forward(
        module, query, key, value, biased, dropout=dropout, scaling=scaling, is_causal=False
    )


def _flex(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> Attended:
    if kwargs.get("tisa_weights"):
        raise ValueError(
            'output_attentions: attn_implementation="flex_attention" has no weights to give; '
            'take "tisa" or "eager"'
        )
    if dropout > 0:
        raise ValueError(
            "attention dropout: FlexAttention has none; set it to 0 in the config, "
            'call model.eval(), or take attn_implementation="tisa"'
        )
    queries, keys = query.shape[-2], key.shape[-2]
    if attention_mask is None and _is_causal(module, query, None, kwargs):
        vector = _causal_vector(module, queries, keys, kwargs)
    else:
        vector = module.score_vector(queries, keys, kwargs)
    segments = _segments(kwargs, queries, keys)
    if segments is not None:
        segments = segments.expand(query.shape[0], -1)
    dense = attention_mask if isinstance(attention_mask, Tensor) else None
    dense = additive(dense, query.dtype)
    hidden = torch.finfo(query.dtype).min

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # One look into the one vector: two of them are refused in the compiled backward pass.
        score = score + vector[h, j - i + (queries - 1)]
        if dense is not None:
            score = score + dense[b, 0, i, j]
        if segments is not None:
            score = torch.where(segments[b, i] == segments[b, j], score, hidden)
        return score

    output = compile_friendly_flex_attention(
        query, key, value, training=module.training, score_mod=score_mod, scale=scaling,
        block_mask=None if isinstance(attention_mask, Tensor) else attention_mask,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    assert isinstance(output, Tensor)
    return output.transpose(1, 2).contiguous(), None


def _biased_mask(
    module: Any, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> Float[Tensor, "batch heads queries keys"]:
    """Return the mask with the dense scores in it, in the query's dtype."""
    queries, keys = query.shape[-2], key.shape[-2]
    if _is_causal(module, query, mask, kwargs):
        vector = _causal_vector(module, queries, keys, kwargs)
    else:
        vector = module.score_vector(queries, keys, kwargs)
    biased = to_matrix(vector, queries, keys).to(query.dtype).unsqueeze(0)
    mask = additive(mask, query.dtype)
    segments = _segments(kwargs, queries, keys)
    if mask is not None:
        biased = biased + mask[..., :keys]
    if segments is not None:
        biased = biased.masked_fill(~same_segment(segments), torch.finfo(query.dtype).min)
    # Two very negative numbers may add up to −inf, and a row of those alone to NaN.
    return biased.clamp_min(torch.finfo(query.dtype).min)


def _causal_vector(
    module: Any, queries: int, keys: int, kwargs: dict[str, Any]
) -> Float[Tensor, "heads span"]:
    """Return the scores with every offset after the query hidden."""
    vector = module.score_vector(queries, keys, kwargs)
    offsets = offset_range(
        queries, keys, query_start=kwargs.get("tisa_query_start"), device=vector.device
    )
    return vector.masked_fill(offsets > 0, float("-inf"))


def _is_causal(module: Any, query: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> bool:
    """Return whether keys after the query must be hidden here, no mask having been made for it."""
    asked = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", False) if asked is None else asked
    return bool(causal) and mask is None and query.shape[-2] > 1


def _segments(kwargs: dict[str, Any], queries: int, keys: int) -> Tensor | None:
    """Return which packed sequence each token belongs to; None where there is one, or a cache."""
    segments = kwargs.get("tisa_segments")
    if kwargs.get("tisa_packed") is not None:
        segments = packed_segments(kwargs["tisa_packed"][0], queries)
    if segments is None or queries != keys or segments.shape[-1] != queries:
        return None
    return segments


def _packed(segments: Tensor, query: Tensor, mask: Tensor | None) -> tuple[Tensor, int] | None:
    """Return the ends of the packed sequences for `tisa.attention` and the longest one's length."""
    if query.shape[0] != 1 or mask is not None or torch.compiler.is_compiling():
        return None
    _, lengths = segments[0].unique_consecutive(return_counts=True)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return ends, int(lengths.max())


def _observe(
    module: Any,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> None:
    observer = getattr(module, "observer", None)
    if observer is not None:
        observer(module, query, key, mask, scaling, kwargs)


def _stock_eager(module: Any) -> Callable[..., Attended]:
    """Return the eager function of the file that the module's stock class is defined in."""
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise ValueError(
        f'attn_implementation: "eager" is not there for {type(module).__name__}; take "tisa"'
    )
