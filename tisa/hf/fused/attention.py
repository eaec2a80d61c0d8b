"""What every fused module calls: the operator, and masks that are never dense.

A fused model's attention implementation is called "tisa-fused". Under that name transformers makes
masks with `mask`, below: None, or which keys are padding, (batch, 1, 1, keys) in uint8. What comes
after a query is hidden by the operator, which knows the offsets. A mask of another dtype is the
caller's own, with four dimensions, and says everything itself.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)
from transformers.modeling_utils import AttentionInterface

from tisa.hf import core
from tisa.offsets import offset_range, recentred, to_matrix
from tisa.ops import attention
from tisa.shapes import Bool, Float, Int, Int32, Tensor

NAME = "tisa-fused"
PADDING = torch.uint8
Ends = tuple[Int32[Tensor, " ends"], int]


@dataclass(frozen=True)
class Told:
    """What a fused module knows of a call, and tells `attend`."""

    causal: bool
    query_start: int | Int[Tensor, ""] | None = None  # in a static cache
    # Where packed sequences end, and how long the longest is: of the queries, and of the keys.
    ends: tuple[Ends, Ends] | None = None
    cross: bool = False
    weights: bool = False


def told(module: Any, causal: bool, cross: bool, args: Any, kwargs: dict[str, Any]) -> Told:
    """Return what a module is told by its arguments, some of which stock code keeps to itself."""
    past = next((x for x in (*args, *kwargs.values()) if isinstance(x, Cache)), None)
    past, start = getattr(past, "self_attention_cache", past), None
    if getattr(past, "is_compileable", False) and not cross:
        assert past is not None
        seen = past.get_seq_length(module.layer_idx)
        # A static cache counts in place, and goes on counting before anything is attended to.
        start = seen.clone() if isinstance(seen, Tensor) else seen
    return Told(causal, start, _ends(kwargs, cross, causal), cross, wants_weights(module, kwargs))


def wants_weights(module: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether attention weights are asked for."""
    asked = kwargs.get("output_attentions")
    if asked is None:
        asked = getattr(getattr(module, "config", None), "output_attentions", False)
    return bool(asked)


def _ends(kwargs: dict[str, Any], cross: bool, causal: bool) -> tuple[Ends, Ends] | None:
    """Return the ends of packed queries and keys, by transformers' names for them.

    Of an encoder with a decoder "q" is the decoder's row, and "k" the encoder's.
    """
    row = {
        side: (kwargs[f"cu_seq_lens_{side}"], int(kwargs[f"max_length_{side}"]))
        for side in "qk"
        if kwargs.get(f"cu_seq_lens_{side}") is not None
    }
    if not row:
        return None
    if len(row) < 2:
        raise ValueError(
            "packed batch: cu_seq_lens_q and cu_seq_lens_k belong together, with max_length_q and "
            "max_length_k; tisa.hf.PackedCollator makes all four"
        )
    if cross:
        return row["q"], row["k"]
    own = row["q"] if causal else row["k"]
    return own, own


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    tisa_told: Told | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the attention's output (batch, queries, heads, dim), and weights if they are wanted.

    `position_bias` is a score vector, or empty where there are no positions.
    """
    if tisa_told is None:
        raise ValueError(
            f'attn_implementation: "{NAME}" is for fused models, and {type(module).__name__} is '
            "not of one; call tisa.hf.fuse(model), which sets the name itself"
        )
    core.check(module, NAME, attention_mask, kwargs, *core.PACKING)
    known = tisa_told
    vector = None if position_bias is None or position_bias.numel() == 0 else position_bias
    if hasattr(module, "score_vector"):
        vector = module.score_vector(query, key.shape[-2], known.query_start)
        module.prove(vector, position_bias, attention_mask, query.shape[-2], key.shape[-2])
    if known.weights:
        return _with_weights(
            module, query, key, value, attention_mask, vector, known, dropout, scaling
        )
    options: dict[str, Any] = dict(
        dropout_p=dropout, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    band = None if vector is None else within(module, query, key.shape[-2])
    if known.ends is not None and not known.cross:
        _check_row(query, attention_mask)
        (ends, longest), _ = known.ends
        if vector is not None:
            vector = recentred(vector, query.shape[-2], longest)
        output = attention(
            query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), vector,
            cu_seqlens=ends, max_seqlen=longest, is_causal=known.causal, band=band, **options,
        )  # fmt: skip
        assert isinstance(output, Tensor)
        return output.unsqueeze(0), None
    visible, causal = attention_mask, known.causal
    if known.ends is not None:
        _check_row(query, attention_mask)
        return _across(query, key, value, *known.ends, **options), None
    if attention_mask is not None:
        causal = causal and attention_mask.dtype == PADDING
        visible = attention_mask.bool() if attention_mask.dtype == PADDING else attention_mask
    output = attention(
        query, key, value, vector, attn_mask=visible, is_causal=causal,
        query_start=known.query_start, band=band, **options,
    )  # fmt: skip
    assert isinstance(output, Tensor)
    return output.transpose(1, 2).contiguous(), None


def within(module: Any, query: Tensor, keys: int) -> Int32[Tensor, "heads 2"] | None:
    """Return the band for `tisa.attention` where the module knows one and it saves work."""
    ends = module.band_ends
    if ends is None or not query.is_cuda or query.dtype == torch.float64:
        return None
    band = module.__dict__.get("band")
    if band is None or band.device != query.device:
        heads = [list(ends)] * query.shape[1]
        band = module.__dict__["band"] = torch.tensor(heads, dtype=torch.int32, device=query.device)
    return band


def _check_row(query: Tensor, mask: Tensor | None) -> None:
    # Switch makes itself a mask of zeros to add where it is given none.
    if mask is not None and mask.is_floating_point() and not bool(mask.any()):
        mask = None
    if query.shape[0] != 1 or mask is not None:
        raise ValueError(
            f"packed batch: expected one row of tokens and no attention_mask, got {query.shape[0]} "
            "rows" + " and a mask" * (mask is not None) + "; tisa.hf.PackedCollator makes it"
        )


def _across(
    query: Tensor, key: Tensor, value: Tensor, queries: Ends, keys: Ends, **options: Any
) -> Float[Tensor, "one total heads dim"]:
    """Return what packed queries get of another row's keys, each example of its own.

    The examples stand side by side meanwhile, as long as the longest one: their product is small
    beside that of the two rows.
    """
    (ends, longest), (others, longest_other) = queries, keys
    placed = _places(ends, longest, query.shape[-2])
    beside = _places(others, longest_other, key.shape[-2])

    def apart(x: Tensor, places: Tensor, length: int) -> Tensor:
        rows = x[0].transpose(0, 1)
        padded = rows.new_zeros(ends.shape[0] * length, *rows.shape[1:])
        padded = padded.index_copy(0, places, rows).unflatten(0, (-1, length))
        return padded[:-1].transpose(1, 2)

    lengths = others.diff()[:, None]
    real = torch.arange(longest_other, device=key.device) < lengths
    output = attention(
        apart(query, placed, longest), apart(key, beside, longest_other),
        apart(value, beside, longest_other), attn_mask=real[:, None, None, :], **options,
    )  # fmt: skip
    assert isinstance(output, Tensor)
    return output.transpose(1, 2).flatten(0, 1).index_select(0, placed).unsqueeze(0)


def _example(ends: Int32[Tensor, " ends"], length: int) -> Int[Tensor, " length"]:
    """Return the number of each packed token's example."""
    tokens = torch.arange(length, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends[1:].contiguous(), tokens, right=True)


def _places(ends: Int32[Tensor, " ends"], longest: int, length: int) -> Int[Tensor, " length"]:
    """Return where each packed token stands when examples have rows of the longest one's length."""
    number = _example(ends, length)
    return torch.arange(length, device=ends.device) + number * longest - ends[number]


def _same_example(queries: Ends, keys: Ends, length: int, others: int) -> Bool[Tensor, "1 1 q k"]:
    """Return which packed query may see which packed key of another row: its own example's."""
    numbers = [_example(ends, n) for (ends, _), n in ((queries, length), (keys, others))]
    return (numbers[0][:, None] == numbers[1][None, :])[None, None]


def seen(
    query: Tensor, key: Tensor, mask: Tensor | None, known: Told
) -> Float[Tensor, "..."] | None:
    """Return all that is hidden as a dense mask that is added, in the query's dtype."""
    queries, keys = query.shape[-2], key.shape[-2]
    if known.ends is not None:
        visible = _same_example(*known.ends, queries, keys)
    elif mask is None or mask.dtype == PADDING:
        visible = torch.ones(1, 1, 1, keys, dtype=torch.bool, device=query.device)
        visible = visible if mask is None else mask.bool()
    else:
        return core.additive(mask, query.dtype)
    if known.causal:
        offsets = offset_range(queries, keys, query_start=known.query_start, device=query.device)
        visible = visible & (to_matrix((offsets <= 0).float(), queries, keys) > 0)
    return core.additive(visible, query.dtype)


def _with_weights(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    vector: Tensor | None, known: Told, dropout: float, scaling: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return what the stock eager function does with the dense bias, its weights with it."""
    bias = None
    if vector is not None:
        bias = to_matrix(vector, query.shape[-2], key.shape[-2]).to(query.dtype).unsqueeze(0)
    hidden = seen(query, key, mask, known)
    files = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
    found = (getattr(file, "eager_attention_forward", None) for file in files)
    eager = next(function for function in found if function is not None)
    attended: tuple[Tensor, Tensor] = eager(
        module, query, key, value, hidden, dropout=dropout, scaling=scaling, position_bias=bias
    )
    return attended


def mask(
    batch_size: int, q_length: int, kv_length: int, *, mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None, kv_offset: int = 0, use_vmap: bool = False, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """Return which keys are padding; None where none is."""
    plain = mask_function in (causal_mask_function, bidirectional_mask_function)
    if use_vmap or not plain or (attention_mask is not None and attention_mask.ndim != 2):
        dense: Tensor | None = sdpa_mask(
            batch_size, q_length, kv_length, mask_function=mask_function, kv_offset=kv_offset,
            attention_mask=attention_mask, use_vmap=use_vmap,
            **kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        )  # fmt: skip
        return dense
    if attention_mask is None:
        return None
    real = attention_mask.bool()
    lacking = max(0, kv_offset + kv_length - real.shape[-1])
    # A static cache is longer than what has been seen, and that the offset hides.
    whole = lacking == 0 or mask_function is causal_mask_function
    if whole and not torch.compiler.is_compiling() and bool(real.all()):
        return None
    real = torch.nn.functional.pad(real, (0, lacking))[:, kv_offset:][:, :kv_length]
    return real[:, None, None, :].to(PADDING)


def register() -> None:
    """Make the name known to transformers."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
