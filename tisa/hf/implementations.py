"""What the package hands to `core`: attention on the operator and FlexAttention, MPNet's own.

"tisa", the default, hands a score vector to `tisa.attention`: no dense bias, fused on a GPU.
"flex_attention" reads the vector in its `score_mod`. "eager" and "sdpa" are those of `core`, and
"eager" shows the fit what it attends with. Scores and bands are made for all layers `Together`.
"""

import math
import sys
from functools import cache, cached_property, partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.flex_attention import compile_friendly_flex_attention
from transformers.masking_utils import bidirectional_mask_function, eager_mask, sdpa_mask
from transformers.utils import is_tracing

from tisa.hf import core
from tisa.hf.core import Call, additive, call_of, is_causal, same_segment, segments_of
from tisa.hf.families import FUSED_TYPES, LOADED_TYPES
from tisa.offsets import entry_of, to_matrix
from tisa.ops import attention
from tisa.ops.scored import worth_a_band
from tisa.scoring import bands_of, scores_of
from tisa.scoring.layers import Grouped
from tisa.shapes import Float, Int32, Tensor

Attended = tuple[Tensor, Tensor | None]
# Where an operation has to be launched before it is done.
LAUNCHES = ("cuda", "xpu", "mps")


def on_operator(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> Attended:
    """Return what `tisa.attention` does with the module's score vector; no weights."""
    call, sinks = call_of(kwargs), kwargs.get("s_aux")
    owner = hasattr(module, "offset_scores")
    if owner and call.weights:
        return eager(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    core.check(module, "tisa", attention_mask, kwargs, "s_aux", "position_bias")
    queries, keys = query.shape[-2], key.shape[-2]
    options: dict[str, Any] = dict(
        dropout_p=dropout,
        scale=scaling,
        is_causal=is_causal(module, query, attention_mask, kwargs),
        enable_gqa=query.shape[1] != key.shape[1],
        return_lse=sinks is not None,
    )
    if kwargs.get("position_bias") is not None:
        bias = kwargs["position_bias"]
        attention_mask = (
            bias if attention_mask is None else bias + additive(attention_mask, query.dtype)
        )
    # Cross-attention, a layer beside the converted ones, a stock model have no positions of ours.
    vector = partial(module.score_vector, call=call) if owner else lambda *lengths: None
    within = partial(band, module, query, call=call) if owner else lambda keys: None
    alone = attention_mask is None and query.shape[0] == 1 and queries == keys
    # Packed sequences, and perhaps something else that says who sees whom.
    tisa = getattr(module.config, "tisa", {}) if owner else {}
    alone = alone and tisa.get("sinks") != "global"
    packed = call.packed if alone else None
    segments = None if packed is not None else segments_of(call, queries, keys)
    if segments is not None and alone and not torch.compiler.is_compiling():
        packed = _ends(segments)
    if packed is not None:
        ends, longest = packed
        if tisa.get("window") is not None:
            options["window"] = tisa["window"]
            last = ends.diff() - 1
            # An empty sequence has neither.
            pair = torch.stack((last.clamp_max(0), last), -1)
            options["always"] = pair if tisa["sinks"] else None
        output = attention(
            query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1),
            vector(longest, longest), cu_seqlens=ends, max_seqlen=longest, band=within(longest),
            **options,
        )  # fmt: skip
        return _sunk(output, sinks).unsqueeze(0).contiguous(), None
    if segments is not None:
        attention_mask = _within(segments, attention_mask)
    # Without a mask, more keys than queries of a stock model are a static cache that is begun.
    start = 0 if options["is_causal"] and not owner else call.query_start
    attention_mask, windowed = window_of(module, query, keys, attention_mask, start)
    scores = vector(queries, keys)
    output = attention(
        query, key, value, scores, attn_mask=attention_mask, query_start=start,
        band=within(keys), **options, **windowed,
    )  # fmt: skip
    return _sunk(output, sinks).transpose(1, 2).contiguous(), None


def window_of(
    module: Any, query: Tensor, keys: int, mask: Tensor | None, start: Any
) -> tuple[Tensor | None, dict[str, Any]]:
    """Return the mask, and a window and its sinks for `tisa.attention`.

    A mask that has a row for each query has each query's own ends: they, and the window, become a
    part of the mask, which is as large as all pairs already.
    """
    tisa = getattr(module.config, "tisa", {}) if hasattr(module, "offset_scores") else {}
    window = tisa.get("window")
    if window is None:
        return mask, {}
    rows = mask is not None and mask.shape[-2] > 1
    if rows or tisa["sinks"] == "global":
        pairs = query.new_empty(()).expand(query.shape[-2], keys)
        hidden = core.beyond_window(module, pairs, mask, None, start)
        if mask is None:
            return ~hidden, {}
        if mask.dtype == torch.bool:
            return mask & ~hidden, {}
        return mask.masked_fill(hidden, torch.finfo(mask.dtype).min), {}
    if not tisa["sinks"]:
        return mask, {"window": window}
    if mask is None:
        ends = torch.arange(2, device=query.device).mul(keys - 1).expand(query.shape[0], -1)
        return mask, {"window": window, "always": ends}
    seen = additive(mask, torch.float32)[:, 0, 0, :keys] > -3e4
    seen = seen.expand(query.shape[0], -1).to(torch.int32)
    ends = torch.stack((seen.argmax(-1), keys - 1 - seen.flip(-1).argmax(-1)), -1)
    return mask, {"window": window, "always": ends}


def _sunk(attended: Tensor | tuple[Tensor, Tensor], sinks: Tensor | None) -> Tensor:
    """Return the output of attention, less the share of each head's sink.

    A sink is one more key, of value 0 and of a learned logit: with the log-sum-exp of the others
    known it takes 1 − sigmoid(lse − sink).
    """
    if not isinstance(attended, tuple):
        return attended
    assert sinks is not None
    output, lse = attended
    # Packed sequences have their heads last.
    sinks = sinks.flatten() if output.ndim == 3 else sinks.view(-1, 1)
    return output * (lse - sinks).sigmoid().unsqueeze(-1).to(output.dtype)


def eager(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> Attended:
    """Return what `core.eager` does, once the module's observer has seen what it is done with."""
    if module.observer is not None:
        module.observer(module, query, key, attention_mask, kwargs.get("scaling"), call_of(kwargs))
    attended: Attended = core.eager(module, query, key, value, attention_mask, **kwargs)
    return attended


def flex(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> Attended:
    """Return what FlexAttention does; it has neither weights nor dropout."""
    call = call_of(kwargs)
    if call.weights:
        raise ValueError(
            'output_attentions: attn_implementation="flex_attention" has no weights to give; '
            'take "tisa" or "eager"'
        )
    if dropout > 0:
        raise ValueError(
            "attention dropout: FlexAttention has none; set it to 0 in the config, "
            'call model.eval(), or take attn_implementation="tisa"'
        )
    core.check(module, "flex_attention", attention_mask, kwargs)
    if module.config.tisa.get("window") is not None:
        raise ValueError(
            'attn_implementation: "flex_attention" has no window with sinks; take "tisa", "sdpa" '
            'or "eager"'
        )
    queries = query.shape[-2]
    vector = core.visible_vector(module, query, key, attention_mask, kwargs)
    segments = segments_of(call, queries, key.shape[-2])
    if segments is not None:
        segments = segments.expand(query.shape[0], -1)
    dense = attention_mask if isinstance(attention_mask, Tensor) else None
    dense = additive(dense, query.dtype)
    hidden = torch.finfo(query.dtype).min

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # One look into the one vector: two of them are refused in the compiled backward pass.
        score = score + vector[h, entry_of(i, j, queries)]
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


def mask(*args: Any, config: Any = None, **kwargs: Any) -> Tensor | None:
    """Return the mask that PyTorch's attention has; refuse a model that never asks for attention.

    A stock BLOOM or MPNet has attention code of its own, and would ignore the name "tisa". Where
    transformers has no "sdpa", attention modules do not say whether they are causal, and some
    of them add the mask by themselves.
    """
    config_class: Any = type(config)
    stock = _stock_class(getattr(config_class, "stock", config_class))
    able = stock is None or hasattr(config, "tisa") or stock._can_set_attn_implementation()
    if not torch.compiler.is_compiling() and not able:
        assert stock is not None
        # A Falcon may have no ALiBi.
        fused = config.model_type in FUSED_TYPES and getattr(config, "alibi", True)
        raise ValueError(
            f'attn_implementation: "tisa" would be ignored by {stock.__name__}, whose attention '
            "does not go through transformers' interface; "
            + "call tisa.hf.fuse(model), or " * fused
            + 'take "eager"'
        )
    padding = kwargs.get("attention_mask")
    if padding is not None and _of_keys_alone(config, padding, kwargs):
        # One row for all queries: with a window, a row for each would be all that is n × n.
        return None if not is_tracing(padding) and padding.all() else padding[:, None, None, :]
    made = sdpa_mask if stock is None or stock._supports_sdpa else eager_mask
    return made(*args, config=config, **kwargs)


def _of_keys_alone(config: Any, padding: Any, told: dict[str, Any]) -> bool:
    """Return whether a windowed encoder's mask says which keys are there, and nothing else."""
    return (
        getattr(config, "tisa", {}).get("window") is not None
        and told.get("mask_function") is bidirectional_mask_function
        and isinstance(padding, Tensor)
        and padding.ndim == 2
        and padding.shape[-1] == told["kv_length"]
    )


@cache
def _stock_class(config_class: Any) -> Any:
    """Return a class of models that have this config, or None where its file is not known."""
    beside = sys.modules.get(config_class.__module__.replace(".configuration_", ".modeling_"))
    every = [] if beside is None else [c for c in vars(beside).values() if _is_model(c)]
    fitting = [c for c in every if getattr(c, "config_class", None) is config_class]
    return next(iter([c for c in fitting if "PreTrained" not in c.__name__] + fitting), None)


def _is_model(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, PreTrainedModel)


def mpnet(
    module: Any, hidden_states: Tensor, mask: Tensor | None, kept: Tensor | None, weights: bool
) -> tuple[Tensor, ...]:
    """Return what MPNet's attention gives: on the operator, or with a dense bias in stock code."""
    shape = (*hidden_states.shape[:-1], -1, module.attention_head_size)

    def projected(linear: Any) -> Tensor:
        made: Tensor = linear(hidden_states).view(shape).transpose(1, 2)
        return made

    if module.observer is not None:
        # The observer wants logits without scores, and the relative bias counts as such.
        seen = additive(mask, hidden_states.dtype)
        if kept is not None:
            length = hidden_states.shape[1]
            dense = to_matrix(kept, length, length).unsqueeze(0)
            seen = dense if seen is None else seen + dense
        scaling = 1 / math.sqrt(module.attention_head_size)
        module.observer(module, projected(module.q), projected(module.k), seen, scaling, Call())
    implementation = module.config._attn_implementation
    if module.observer is not None or weights or implementation == core.own_name("eager"):
        stock: tuple[Tensor, ...] = module.with_dense(hidden_states, mask, kept, weights)
        return stock
    length = hidden_states.shape[1]
    vector = module.score_vector(length, length, Call())
    vector = vector if kept is None else vector + kept
    query = projected(module.q)
    mask, windowed = window_of(module, query, length, mask, None)
    output = attention(
        query, projected(module.k), projected(module.v), vector, attn_mask=mask,
        dropout_p=module.dropout.p if module.training else 0.0, **windowed,
    )  # fmt: skip
    assert isinstance(output, Tensor)
    return (module.o(output.transpose(1, 2).flatten(-2)),)


def band(module: Any, query: Any, keys: int, call: Call) -> Int32[Tensor, "heads 2"] | None:
    """Return the band for `tisa.attention` where it saves work: on a GPU, not for few keys."""
    if not query.is_cuda or not worth_a_band(query.dtype, keys):
        return None
    scoring = module.scoring(call)
    known = None if call.together is None else call.together.band(scoring, query.dtype)
    return scoring.band(query.dtype) if known is None else known


def _ends(segments: Tensor) -> tuple[Tensor, int]:
    """Return where packed sequences begin and end, and the longest one's length."""
    _, lengths = segments[0].unique_consecutive(return_counts=True)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return ends, int(lengths.max())


def _within(segments: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mask in which no token sees another packed sequence."""
    same = same_segment(segments)
    if mask is None:
        return same
    if mask.dtype == torch.bool:
        return mask & same
    return mask.masked_fill(~same, torch.finfo(mask.dtype).min)


class Together:
    """What the layers of one forward pass ask for, made for all of them when the first one asks.

    Each layer has kernels of its own, and dozens of small operations to make scores and a band of
    them; on a GPU launching these takes the host longer than attention takes the GPU. On a CPU,
    where nothing is launched, each makes its own, and layers that share one make it once. Nothing
    is kept for the next pass: a fused optimiser changes parameters without leaving a trace.
    """

    def __init__(
        self, owners: list[Any], *, with_vectors: bool = True, at_once: bool = True
    ) -> None:
        self.owners = owners
        self.with_vectors, self.at_once = with_vectors, at_once
        self.vectors: dict[tuple[int, int], dict[int, Tensor]] = {}
        self.bands: dict[torch.dtype, dict[int, Tensor | None]] = {}

    def vector(self, scoring: Any, queries: int, keys: int) -> Float[Tensor, "heads span"] | None:
        """Return the scores of this scoring function; None if it has to make them alone."""
        if not self.with_vectors:
            return None
        found = self.vectors.get((queries, keys))
        if found is None:
            found = self.vectors[queries, keys] = {}
            if self.at_once:
                made = scores_of(self.grouped, queries, keys)
                found |= dict(zip(map(id, self.grouped.functions), made, strict=True))
        if not self.at_once and id(scoring) not in found:
            found[id(scoring)] = scoring(queries, keys)
        return found.get(id(scoring))

    def band(self, scoring: Any, dtype: torch.dtype) -> Int32[Tensor, "heads 2"] | None:
        """Return the band of this scoring function; None if it has to make it alone."""
        if dtype not in self.bands:
            bands = bands_of(self.grouped, dtype)
            self.bands[dtype] = dict(zip(map(id, self.grouped.functions), bands, strict=True))
        return self.bands[dtype].get(id(scoring))

    @cached_property
    def grouped(self) -> Grouped:
        """Return the functions that can be evaluated here and now, with others."""
        return Grouped(s for owner in self.owners for s in owner.offset_scores).at_hand()


def together(module: Any) -> Together | None:
    """Return what computes all layers' scores and bands at once, where that is the same."""
    known = module.config.tisa["base_model_type"] in LOADED_TYPES
    if torch.compiler.is_compiling() or not known:
        return None
    # A layer that is computed again in the backward pass needs scores of its own.
    again = module.training and any(
        getattr(m, "gradient_checkpointing", False) for m in module.modules()
    )
    at_once = module.device.type in LAUNCHES
    return Together(module.tisa_owners, with_vectors=not again, at_once=at_once)
