"""A transformers model with translation-invariant self-attention: all that it needs to run.

Every attention head adds f(key − query) = Σ a·exp(−|b|·(k − c)²) to its logits. This file is the
one implementation. The package tisa imports it and hands its operator in (`parts`). A copy lies
beside every saved model as `modeling_tisa.py`: `from_pretrained(…, trust_remote_code=True)` reads
it where tisa is not installed, and has "eager" and "sdpa" attention with a dense bias. So it needs
torch and transformers alone.

An attention module becomes an instance of a subclass of its own class, made here from a mixin, and
keeps its class's name, by which transformers and accelerate look for it. A subclass is not a patch:
no other model of the same class notices. What a model was given is in its config under `tisa`.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# The highest format of a config that is read here: 1; with scores that are no kernels 2, with some
# vectors of the position table, or MPNet's own table and no positions, 3; with a window 4.
FORMAT = 4
# No limit: more tokens than fit any memory.
LIFTED = 2**20
# Under these names a learned position table is found.
TABLES = ("position_embeddings", "wpe", "embed_positions", "position_embedding")
# What embeddings have that count positions from the padding token's row on.
COUNTED = "create_position_ids_from_inputs_embeds"
# In the names of attention to another model's output, which often has self-attention's class.
CROSS = ("cross", "encoder_attn", "encoder_decoder_attention")
# What layers hand to attention functions and none of them needs: a window is in the mask already,
# the rest is for the model around the layer.
HARMLESS = frozenset((
    "tisa_call", "is_causal", "sliding_window", "position_ids", "cache_position", "use_cache",
    "return_dict", "output_attentions", "output_hidden_states", "output_router_logits",
    "num_items_in_batch", "deterministic", "token_type_ids", "input_ids",
))  # fmt: skip
# Where packed sequences end: heard (`_packed`), or in a mask.
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@dataclass(frozen=True)
class Call:
    """What a forward pass hands to its attention functions, in the one argument `tisa_call`."""

    weights: bool = False  # attention weights are wanted
    segments: Tensor | None = None  # (batch, length): the number of each token's packed sequence
    packed: tuple[Tensor, int] | None = None  # the ends of those, and the longest, if told
    query_start: int | Tensor | None = None  # the first query's place in a static cache
    pass_index: int = 0  # which of ALBERT's passes
    vector: Tensor | None = None  # scores that all passes share
    together: Any = None  # what makes the scores of all layers at once

    def to(self, device: Any, **options: Any) -> "Call":
        """Return it there: accelerate moves what a layer is given to where the layer is."""
        return Call(**tree_map_only(Tensor, lambda x: x.to(device, **options), vars(self)))


class Scores(nn.Module):
    """f(k) of each head, as `tisa.TISA` computes it: float32 whatever the model's dtype is."""

    def __init__(self, heads: int, tisa: dict[str, Any]) -> None:
        super().__init__()
        if other := tisa.get("scoring"):
            raise ValueError(f"scoring: {other['name']} needs tisa, and no trust_remote_code=True")
        kernels = tisa["num_kernels"]
        for name in ("kernel_amplitudes", "kernel_sharpness", "kernel_offsets"):
            self.register_parameter(name, nn.Parameter(torch.zeros(heads, kernels).float()))

    def reset_parameters(self) -> None:
        """Set no scores."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, queries: int, keys: int, *, query_start: Any = None) -> Tensor:
        """Return (heads, queries + keys − 1): the score of every offset from the lowest on."""
        c = self.kernel_offsets.unsqueeze(-1)
        k = offsets(queries, keys, query_start, c.device).to(c.dtype)
        a, b = self.kernel_amplitudes.unsqueeze(-1), self.kernel_sharpness.unsqueeze(-1)
        return (a * torch.exp(-b.abs() * (k - c) ** 2)).sum(1)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        def kept(tensor: Tensor) -> Tensor:
            moved: Tensor = fn(tensor)
            half = moved.dtype in (torch.float16, torch.bfloat16)
            return tensor.to(device=moved.device, dtype=torch.float32) if half else moved

        return super()._apply(kept, recurse)


def offsets(queries: int, keys: int, start: Any, device: Any) -> Tensor:
    """Return the offset of every entry of a score vector; by default the last key has 0."""
    entries = torch.arange(max(0, queries + keys - 1), device=device)
    return entries - (queries - 1) - (keys - queries if start is None else start)


def eager(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
          **kwargs: Any) -> Any:  # fmt: skip
    """Return what the eager function beside the stock class does with the scores in its mask."""
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            # Sinks it takes from the module.
            check(module, "eager", attention_mask, kwargs, "s_aux", *_names(function))
            biased = _biased(module, query, key, attention_mask, kwargs)
            return function(module, query, key, value, biased, **kwargs)
    raise ValueError(
        f'attn_implementation: "eager" is not there for {type(module).__name__}; take '
        f"{', '.join(name for name in parts.functions if name != 'eager')}"
    )


def sdpa(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
         dropout: float = 0.0, scaling: float | None = None, **kwargs: Any) -> Any:  # fmt: skip
    """Return what PyTorch's attention does with the scores in its mask."""
    options = {"dropout": dropout, "scaling": scaling}
    if call_of(kwargs).weights:
        return eager(module, query, key, value, attention_mask, **options, **kwargs)
    check(module, "sdpa", attention_mask, kwargs, "position_bias")
    biased = _biased(module, query, key, attention_mask, kwargs)
    if kwargs.get("position_bias") is not None:
        biased = (biased + kwargs["position_bias"]).clamp_min(torch.finfo(query.dtype).min)
    return sdpa_attention_forward(module, query, key, value, biased, **options, is_causal=False)


def check(module: Any, name: str, mask: Any, kwargs: dict[str, Any], *known: str) -> None:
    """Refuse an argument that attention of that name would drop without a word."""
    call = call_of(kwargs)
    apart = mask is not None or call.packed is not None or call.segments is not None
    for argument in kwargs.keys() - HARMLESS - {*known, *(PACKING if apart else ())}:
        value = kwargs[argument]
        if value is None or (isinstance(value, (int, float)) and not value):
            continue
        alone = "only the stock model has it, with an implementation of transformers'"
        advice = alone if name == "eager" else 'take attn_implementation="eager"'
        raise ValueError(
            f'attn_implementation: {type(module).__name__} hands "{argument}" to its attention, '
            f'which "{name}" does not know and would leave out; {advice}'
        )


def _biased(module: Any, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any]) -> Tensor:
    """Return the mask with the dense scores in it, in the query's dtype."""
    queries, keys, lowest = query.shape[-2], key.shape[-2], torch.finfo(query.dtype).min
    vector = visible_vector(module, query, key, mask, kwargs)
    biased = parts.to_matrix(vector, queries, keys).to(query.dtype).unsqueeze(0)
    if mask is not None:
        biased = biased + additive(mask, query.dtype)[..., :keys]
    call = call_of(kwargs)
    segments = segments_of(call, queries, keys)
    if segments is not None:
        biased = biased.masked_fill(~same_segment(segments), lowest)
    hidden = beyond_window(module, biased, mask, segments, call.query_start)
    biased = biased if hidden is None else biased.masked_fill(hidden, lowest)
    # Two very negative numbers may add up to −inf, and a row of those alone to NaN.
    return biased.clamp_min(lowest)


def visible_vector(module: Any, query: Tensor, key: Tensor, mask: Any, kwargs: Any) -> Tensor:
    """Return the scores, those of later keys hidden where no mask does it."""
    queries, keys, call = query.shape[-2], key.shape[-2], call_of(kwargs)
    vector: Tensor = module.score_vector(queries, keys, call)
    if not is_causal(module, query, mask, kwargs):
        return vector
    later = offsets(queries, keys, call.query_start, vector.device) > 0
    return vector.masked_fill(later, float("-inf"))


def is_causal(module: Any, query: Tensor, mask: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether keys after the query must be hidden here, no mask having been made for it."""
    asked = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", False) if asked is None else asked
    return bool(causal) and mask is None and query.shape[-2] > 1


def call_of(kwargs: dict[str, Any]) -> Call:
    """Return what the pass handed on; a model that hands nothing on has nothing to say."""
    return kwargs.get("tisa_call") or Call(packed=_packed(kwargs))


def _packed(given: dict[str, Any]) -> Any:
    """Return where packed sequences end and the longest one's length, if a model was told them."""
    ends, longest = given.get("cu_seq_lens_q"), given.get("max_length_q")
    told = None if ends is None or longest is None else (ends, int(longest))
    return given.get("tisa_packed", told)


def segments_of(call: Call, queries: int, keys: int) -> Tensor | None:
    """Return which packed sequence each token belongs to; None where there is one, or a cache."""
    segments = call.segments
    if call.packed is not None:
        places = torch.arange(queries, device=call.packed[0].device)
        segments = torch.bucketize(places, call.packed[0][1:], right=True).unsqueeze(0)
    return segments if segments is not None and queries == keys == segments.shape[-1] else None


def same_segment(segments: Tensor) -> Tensor:
    """Return (batch, 1, length, length): which query may see which key of its packed sequence."""
    return (segments.unsqueeze(-1) == segments.unsqueeze(-2)).unsqueeze(1)


def beyond_window(module: Any, dense: Tensor, mask: Any, segments: Any, start: Any) -> Any:
    """Return where the window hides a key, or None: not the ends of what the masks show a query."""
    tisa, (queries, keys), device = module.config.tisa, dense.shape[-2:], dense.device
    if tisa.get("window") is None:
        return None
    first = keys - queries if start is None else start
    k = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None] - first
    far = (k.abs() > tisa["window"])[None, None]
    seen = far | True if mask is None else additive(mask, torch.half)[..., :keys] > -3e4
    seen = seen if segments is None else seen & same_segment(segments)
    ends = (seen.cumsum(-1) == 1) | (seen.flip(-1).cumsum(-1).flip(-1) == 1)
    ends = ends & seen & bool(tisa["sinks"])
    see_all = (ends & (k == 0)).any(-1, keepdim=True) & (tisa["sinks"] == "global")
    return far & ~(ends | see_all)


def additive(mask: Any, dtype: torch.dtype) -> Any:
    """Return a mask that is added to the logits from one that may be boolean."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, mask.new_zeros((), dtype=dtype), torch.finfo(dtype).min)


def own_name(implementation: str | None) -> str:
    """Return the name of our function for a model's attention implementation, or refuse it."""
    chosen = parts.default if implementation is None else implementation
    if chosen not in parts.functions:
        raise ValueError(
            f'attn_implementation: "{chosen}" would ignore the position scores of this model; '
            f"take one of {', '.join(parts.functions)}{parts.more}"
        )
    # Several copies of this file may be loaded: each has its functions in the common registry.
    return f"tisa-{hash(__name__):x}|{chosen}"


def register() -> None:
    """Make the functions known to transformers."""
    for name, function in parts.functions.items():
        AttentionInterface.register(own_name(name), function)


class _View:
    """A model's config as one of its attention modules sees it: with the functions above."""

    def __init__(self, config: Any) -> None:
        self.__dict__["config"] = config

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["config"], name)
        return own_name(value) if name == "_attn_implementation" else value


class Mixed(nn.Module):
    """What all mixins share: instances can be pickled, although their class was made here."""

    mixin: Any
    stock: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (self.mixin, self.stock), self.__dict__


class OwnScores(Mixed):
    """Mixin: an attention module that owns its scores, whatever its model's implementation is."""

    offset_scores: nn.ModuleList
    # Called with (module, query, key, mask, scaling, call) before attending; used by the fit.
    observer: Any = None

    @property
    def config(self) -> Any:
        """Return the model's config, in which the attention implementation is ours."""
        return _View(self.__dict__["_model_config"])

    @config.setter
    def config(self, config: Any) -> None:
        self.__dict__["_model_config"] = config

    def scoring(self, call: Call) -> Any:
        """Return the pass's scoring function, or what stands for it: peft wraps what it trains."""
        return self.offset_scores[call.pass_index if len(self.offset_scores) > 1 else 0]

    def score_vector(self, queries: int, keys: int, call: Call) -> Tensor:
        """Return this pass's scores of the offsets between that many queries and keys."""
        if call.vector is not None and call.vector.shape[-1] == queries + keys - 1:
            return call.vector
        scoring, known = self.scoring(call), None
        if call.together is not None and call.query_start is None:
            known = call.together.vector(scoring, queries, keys)
        return scoring(queries, keys, query_start=call.query_start) if known is None else known

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the stock module does; tell the attention function of a static cache."""
        # By its type: it is `past_key_values` in most models, `layer_past` in others.
        past = next((x for x in (*args, *kwargs.values()) if isinstance(x, Cache)), None)
        past = getattr(past, "self_attention_cache", past)
        index = getattr(self, "layer_idx", None) or 0
        layers = getattr(past, "layers", ())
        layer = layers[index] if index < len(layers) else None
        if getattr(past, "is_compileable", False):
            if getattr(layer, "is_sliding", False):
                raise ValueError("past_key_values: a static sliding-window cache moves its keys; "
                                 'take a cache of type "dynamic" or "static"')  # fmt: skip
            if getattr(layer, "keys", past) is None and layer.is_initialized:
                raise ValueError("past_key_values: a layer that shares keys has no places "
                                 'in a static cache; take one of type "dynamic"')  # fmt: skip
            seen = past.get_seq_length(index)
            # A static cache counts in place, and goes on counting before the scores are asked.
            seen = seen.clone() if torch.is_tensor(seen) else seen
            kwargs["tisa_call"] = replace(call_of(kwargs), query_start=seen)
        return super().forward(*args, **kwargs)


class MPNetScores(OwnScores):
    """Mixin for MPNet, whose attention has a bias of its own and knows no interface."""

    keeps_relative_bias: bool

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, position_bias: Any = None,
                output_attentions: bool = False, **kwargs: Any) -> Any:  # fmt: skip
        """Return the attention output, and the weights if they are asked for."""
        implementation = self.__dict__["_model_config"]._attn_implementation or parts.default
        known = ("tisa", "eager") if parts.mpnet else ("eager",)
        if implementation not in known:
            raise ValueError(
                f'attn_implementation: MPNet has {" and ".join(known)}, got "{implementation}"'
            )
        check(self, implementation, attention_mask, kwargs)
        # Where the scores have been fitted to this bias, too, they stand for it.
        kept = position_bias if self.keeps_relative_bias else None
        attend = parts.mpnet or MPNetScores.with_dense
        return attend(self, hidden_states, attention_mask, kept, output_attentions)

    def with_dense(self, hidden_states: Tensor, mask: Any, kept: Any, weights: bool) -> Any:
        """Return what stock code does with the dense scores in its own bias."""
        length, dtype = hidden_states.shape[1], hidden_states.dtype
        vector = self.score_vector(length, length, Call())
        vector = vector if kept is None else vector + kept
        bias = parts.to_matrix(vector, length, length).to(dtype).unsqueeze(0)
        hidden = beyond_window(self, bias, mask, None, None)
        bias = bias if hidden is None else bias.masked_fill(hidden, torch.finfo(dtype).min / 2)
        return super(OwnScores, self).forward(hidden_states, additive(mask, dtype), bias, weights)


class Buckets(Mixed):
    """Mixin for MPNet's encoder: its bias is a score of each offset, and not of each pair."""

    def compute_position_bias(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return (heads, span), in float32 at least: gradients are summed before they are cut."""
        length, table = x.shape[1], self.relative_attention_bias
        bucket = self.relative_position_bucket(offsets(length, length, None, x.device))
        found = table(bucket)
        return found.to(torch.promote_types(found.dtype, torch.float32)).T


class Passes(Mixed):
    """Mixin for ALBERT's stack, which tells its one layer in which pass it is."""

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Return what ALBERT's own loop does; scores that passes share are computed once."""
        hidden_states, call = self.embedding_hidden_mapping_in(hidden_states), call_of(kwargs)
        (*others, owner) = (m for m in self.modules() if isinstance(m, OwnScores))
        if not others and len(owner.offset_scores) == 1:
            length = hidden_states.shape[1]
            call = replace(call, vector=owner.offset_scores[0](length, length))
        for index in range(self.config.num_hidden_layers):
            kwargs["tisa_call"] = replace(call, pass_index=index)
            group = self.albert_layer_groups[group_of(self.config, index)]
            hidden_states = group(hidden_states, attention_mask, **kwargs)
        return BaseModelOutput(last_hidden_state=hidden_states)


def group_of(config: Any, index: int) -> int:
    """Return the group of layers that ALBERT's pass of this number goes through."""
    return int(index / (config.num_hidden_layers / config.num_hidden_groups))


class Nothing(nn.Module):
    """What stands where a position table was: zeros, one to an index where it was `relative`."""

    padding_idx = None

    def __init__(self, relative: bool = False) -> None:
        super().__init__()
        self.relative = relative

    @property
    def weight(self) -> Tensor:
        """Return a table without width: CLIP and SigLIP ask it how many tokens they may take."""
        return torch.empty(LIFTED, 0)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return 0."""
        given = next((x for x in (*args, *kwargs.values()) if torch.is_tensor(x)), torch.empty(0))
        return torch.zeros((*given.shape, 1) if self.relative else (), device=given.device)


class Places(Nothing):
    """What stands where a position table was: its vectors at some places, and lines between."""

    def __init__(self, knots: list[int], dim: int, dtype: Any) -> None:
        super().__init__()
        self.knots = knots
        self.places = nn.Parameter(torch.zeros(len(knots), dim, dtype=dtype))

    def forward(self, position_ids: Tensor) -> Tensor:
        """Return each place's vector: by weights of all, whose gradients are sums."""
        wide = torch.promote_types(self.places.dtype, torch.float32)
        own = torch.tensor(self.knots, dtype=wide, device=position_ids.device)
        gaps = torch.cat((own.new_ones(1), own.diff(), own.new_ones(1)))
        at = position_ids.clamp(self.knots[0], self.knots[-1]).unsqueeze(-1).to(wide)
        weights = torch.minimum(1 + (at - own) / gaps[:-1], 1 - (at - own) / gaps[1:])
        return weights.clamp_min(0).to(self.places.dtype) @ self.places


class Folded(Mixed):
    """Mixin: word embeddings that add what of the positions had nothing to do with order.

    `fold` has three vectors: for all tokens but two, the one that is always last, the one that is
    always first (which wins). Output embeddings that share the weight have none.
    """

    first_token_id: int
    last_token_id: int
    fold: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        """Return the embeddings with the folded vectors: by masks, whose gradients are sums."""
        (rest, last, first), ids = self.fold, input.unsqueeze(-1)
        rest = torch.where(ids == self.last_token_id, last, rest)
        return super().forward(input) + torch.where(ids == self.first_token_id, first, rest)


@cache
def _with_mixin(mixin: Any, cls: Any) -> Any:
    return type(cls.__name__, (mixin, cls), {"__module__": __name__, "mixin": mixin, "stock": cls})


def _blank(mixin: Any, cls: Any) -> Any:
    register()
    return (made := _with_mixin(mixin, cls)).__new__(made)


def become(module: Any, mixin: Any) -> None:
    """Turn the module into one of the subclass: it keeps its parameters and its place."""
    config = module.__dict__.pop("config", None)
    module.__class__ = _with_mixin(mixin, type(module))
    if config is not None:
        module.config = config


def is_mpnet(module: Any) -> bool:
    """Return whether the attention module is MPNet's, which has its own way."""
    return any(cls.__name__ == "MPNetSelfAttention" for cls in type(module).__mro__)


@cache
def uses_interface(cls: Any) -> bool:
    """Return whether a class's attention goes through transformers' interface."""
    stock, source = getattr(cls, "stock", cls), ""
    with suppress(OSError, TypeError):
        source = inspect.getsource(stock.forward)
    known = "ALL_ATTENTION_FUNCTIONS" in source and "self.config" in source
    return known and "Cross" not in stock.__name__


def attention_modules(model: nn.Module) -> list[Any]:
    """Return the self-attention modules that can own scores, in the order of the layers."""
    return [
        m for name, m in model.named_modules()
        if not getattr(m, "is_cross_attention", False) and (is_mpnet(m) or uses_interface(type(m)))
        and not any(word in place for place in name.split(".")[-2:] for word in CROSS)
    ]  # fmt: skip


def num_heads(module: Any, config: Any) -> int:
    """Return how many query heads the attention module has."""
    found = (getattr(module, n, None) for n in ("num_attention_heads", "num_heads", "n_heads"))
    return next((n for n in found if isinstance(n, int)), None) or int(config.num_attention_heads)


def place_of_table(model: nn.Module) -> tuple[Any, str] | None:
    """Return the module that holds the model's learned position table, and the name there."""
    places = ((parent, name) for parent in model.modules() for name in TABLES)
    return next((p for p in places if isinstance(getattr(*p, None), nn.Embedding)), None)


def is_albert(model: Any) -> bool:
    """Return whether the model is an ALBERT, which shares one layer's weights."""
    return str(model.config.model_type).removeprefix("tisa-") == "albert"


def passes(model: Any) -> int:
    """Return how often each attention module is gone through: ALBERT's passes, 1 elsewhere."""
    return int(model.config.num_hidden_layers) if is_albert(model) else 1


def _attach(model: Any) -> None:
    """Give a freshly built stock model what its config says: scores, and no positions."""
    register()
    tisa, owners = model.config.tisa, attention_modules(model)
    for module in owners:
        heads = num_heads(module, model.config)
        become(module, MPNetScores if is_mpnet(module) else OwnScores)
        module.config = model.config
        module.keeps_relative_bias = tisa.get("keeps_relative_bias", tisa["positions"] == "keep")
        module.offset_scores = nn.ModuleList(
            parts.scoring(heads, tisa) for _ in range(1 if tisa["shared"] else passes(model))
        )
    for module in list(model.modules()):
        if hasattr(module, "albert_layer_groups"):
            become(module, Passes)
        if hasattr(module, "relative_attention_bias"):
            become(module, Buckets)
            if not any(owner.keeps_relative_bias for owner in owners):
                # The scores were fitted to it too.
                module.relative_attention_bias = Nothing(relative=True)
    if tisa["positions"] != "keep":
        _remove_positions(model)
    innermost = [m for m in model.modules() if isinstance(m, PreTrainedModel)][-1]
    innermost.tisa_owners = owners
    innermost.register_forward_pre_hook(_announce, with_kwargs=True)


def _remove_positions(model: Any) -> None:
    place, tisa = place_of_table(model), model.config.tisa
    assert place is not None
    table, knots = getattr(*place), tisa.get("places")
    made = Places(knots, table.embedding_dim, table.weight.dtype) if knots else Nothing()
    setattr(*place, made)
    if hasattr(place[0], "position_ids"):
        place[0].register_forward_pre_hook(_without_buffers, with_kwargs=True)
    if tisa["fold"]:
        words = model.get_input_embeddings()
        become(words, Folded)
        words.first_token_id, words.last_token_id = tisa["first_token_id"], tisa["last_token_id"]
        words.fold = nn.Parameter(torch.zeros(3, words.embedding_dim, dtype=words.weight.dtype))


@cache
def _names(called: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(getattr(called, "forward", called)).parameters)[1:]


def _without_buffers(module: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Give the embeddings positions that no table limits: 0 where no vector is looked up."""
    given = dict(zip(_names(type(module)), args, strict=False)) | kwargs
    tokens = given.get("input_ids")
    tokens = given["inputs_embeds"][..., 0] if tokens is None else tokens
    if not any(isinstance(child, Places) for child in module.children()):
        given["position_ids"] = torch.zeros_like(tokens[:1], dtype=torch.long)
    elif given.get("position_ids") is None and not hasattr(module, COUNTED):
        past = given.get("past_key_values_length") or 0
        places = torch.arange(past, past + tokens.shape[1], device=tokens.device)
        given["position_ids"] = places.unsqueeze(0)
    # Left out, they come from a buffer as long as the table.
    if "token_type_ids" in _names(type(module)) and given.get("token_type_ids") is None:
        given["token_type_ids"] = torch.zeros_like(tokens, dtype=torch.long)
    return (), given


def _announce(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Tell the attention functions what the model was called with and does not pass on to them."""
    given = dict(zip(_names(type(module)), args, strict=False)) | kwargs
    packed, mask, places = _packed(given), given.get("attention_mask"), given.get("position_ids")
    wanted, segments = given.get("output_attentions"), None
    # A mask with four dimensions says itself who sees whom; who says where packed sequences end
    # need not wait for a look at the positions.
    if getattr(mask, "ndim", 2) == 4:
        packed = packed if module.config.tisa["base_model_type"] != "mpnet" else None
    elif packed is None and places is not None and places.ndim == 2:
        restarts = places.diff(dim=-1, prepend=places[:, :1] - 1) != 1
        if torch.compiler.is_compiling() or bool(restarts.any()):
            segments = restarts.cumsum(-1)
    call = Call(
        weights=bool(module.config.output_attentions if wanted is None else wanted),
        segments=segments, packed=packed, together=parts.together and parts.together(module),
    )  # fmt: skip
    if module.config.tisa["base_model_type"] != "mpnet":
        return args, {k: v for k, v in kwargs.items() if k != "tisa_packed"} | {"tisa_call": call}
    tokens = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
    segments = segments_of(call, tokens.shape[1], tokens.shape[1])
    if segments is None:
        return args, kwargs
    # MPNet passes nothing on; a mask with four dimensions it takes as it is.
    same = same_segment(segments)
    same = same if mask is None else same & mask[:, None, None, :].bool()
    args = args[: _names(type(module)).index("attention_mask")]
    return args, kwargs | {"attention_mask": additive(same, module.dtype)}


@contextmanager
def _small_table(config: Any) -> Iterator[None]:
    """Have stock code make few positions where they are replaced: some square their number."""
    names = ("sinusoidal_pos_embds", "max_position_embeddings")
    sines, limit = (getattr(config, name, None) for name in names)
    if config.tisa["positions"] != "keep":
        config.max_position_embeddings = max(16, (getattr(config, "pad_token_id", 0) or 0) + 2)
        if sines:
            config.sinusoidal_pos_embds = False
    try:
        yield
    finally:
        config.max_position_embeddings = limit
        if sines:
            config.sinusoidal_pos_embds = sines


class Converted(PreTrainedModel):
    """Mixin: a transformers model whose attention modules own scores of the offset."""

    _keep_in_fp32_modules_strict = {"offset_scores"}  # noqa: RUF012

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        tisa = getattr(config, "tisa", None)
        if not isinstance(tisa, dict) or "format" not in tisa:
            raise ValueError(
                f"{type(config).__name__}: no scores are described in it (`tisa`); "
                "make a converted model with tisa.hf.convert"
            )
        if tisa["format"] > FORMAT:
            raise ValueError(
                f"{type(config).__name__}: written in format {tisa['format']}, this code reads up "
                f"to {FORMAT}; upgrade it: pip install --upgrade tisa"
            )
        with _small_table(config):
            super().__init__(config, *args, **kwargs)
        _attach(self)

    def initialize_weights(self) -> None:
        """Set what no checkpoint has, in the size in which it was made."""
        with _small_table(self.config):
            super().initialize_weights()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the model; to lack more than a head, or a pooler of no head's, is an error."""
        wanted = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        body = "" if model.base_model is model else f"{model.base_model_prefix}."
        missing = {k for k in info["missing_keys"] if k.startswith(body)}
        pooler = {k for k in missing if "pooler" in k.split(".")}
        if lost := sorted(missing - pooler):
            raise ValueError(
                f"{args[0] if args and args[0] else cls.__name__}: the file lacks {len(lost)} "
                f"tensors, {', '.join(lost[:3])} …; take a whole one, or convert the stock model"
            )
        own = getattr(model, "pooler", None)
        if pooler and own is not None and len(pooler) == len(own.state_dict()):
            model.pooler = None
            info["missing_keys"] -= pooler
        return (model, info) if wanted else model

    def _init_weights(self, module: Any) -> None:
        if isinstance(module, parts.scores):
            if not all(getattr(p, "_is_hf_initialized", False) for p in module.parameters()):
                getattr(module, "reset_parameters", bool)()
        elif not isinstance(module, Nothing):
            super()._init_weights(module)

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return that it is transformers' own: what stock code sets after loading is set."""
        return False

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # transformers asks a class's file, and would take the answer that a stock MPNet gave.
        return True

    def _check_and_adjust_attn_implementation(self, attn_implementation: Any, *args: Any,
                                              **kwargs: Any) -> str:  # fmt: skip
        own_name(attn_implementation)
        if attn_implementation is None and parts.default == "tisa":
            # The operator has no soft-capping.
            return "eager" if getattr(self.config, "attn_logit_softcapping", None) else "tisa"
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)


@cache
def config_class(stock: Any) -> Any:
    """Return the config class of a converted model of that stock config."""
    if stock.model_type.startswith("tisa-"):
        return stock
    kind = {"__module__": __name__, "model_type": f"tisa-{stock.model_type}", "stock": stock}
    made = globals()[f"Tisa{stock.__name__}"] = type(f"Tisa{stock.__name__}", (stock,), kind)
    return made


@cache
def model_class(stock: Any) -> Any:
    """Return the converted class of a stock model class."""
    name, config = f"Tisa{stock.__name__}", config_class(stock.config_class)
    kind = {"__module__": __name__, "__doc__": f"{stock.__name__} with scores of the offset.",
            "config_class": config, "stock": stock}  # fmt: skip
    made = globals()[name] = type(name, (parts.model, stock), kind)
    return made


def auto_class(name: str, stock_config: Any) -> Any:
    """Return the stock model class that this Auto class has for a stock config, or None."""
    mapping = getattr(getattr(modeling_auto, name, None), "_model_mapping", {})
    found = mapping.get(stock_config, None)
    found = found[0] if isinstance(found, tuple) else found
    # A mapping may name a model whose config is of another type (5.23: Qwen2's, JevForDecision).
    return found if getattr(found, "config_class", None) is stock_config else None


class TisaConfig(PreTrainedConfig):
    """Reads the config of any converted model."""

    @classmethod
    def from_pretrained(cls, name: Any, **kwargs: Any) -> Any:
        """Return the config in the class of its model type."""
        values, _ = PreTrainedConfig.get_config_dict(name, **kwargs)
        kwargs.pop("trust_remote_code", None)
        stock = CONFIG_MAPPING[values["tisa"]["base_model_type"]]
        return config_class(stock).from_pretrained(name, **kwargs)


class _Loader:
    """What an Auto class calls: it loads the converted form of the class that it would give."""

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, config: Any, **kwargs: Any) -> Any:
        stock = CONFIG_MAPPING[config.tisa["base_model_type"]]
        made = model_class(auto_class(cls.__name__.replace("Tisa", "Auto", 1), stock))
        return made.from_pretrained(name, *args, config=config, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        return


def __getattr__(name: str) -> Any:
    """Return what a config names for `AutoModelFor…`: this file's `TisaModelFor…`."""
    if name.replace("Tisa", "Auto", 1) not in modeling_auto.__all__:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    return type(name, (_Loader,), {"__module__": __name__})


@dataclass
class Parts:
    """What the package hands in; by default what stands for it where the package is not."""

    scoring: Any = Scores  # of (heads, `tisa` of the config)
    scores: Any = Scores  # the class of what that makes
    to_matrix: Any = lambda vector, queries, keys: vector.unfold(-1, keys, 1).flip(-2)
    functions: dict[str, Any] = field(default_factory=lambda: {"sdpa": sdpa, "eager": eager})
    default: str = "sdpa"
    more: str = ", or install the package tisa"
    mpnet: Any = None  # (module, hidden_states, mask, kept bias, weights wanted) → output
    together: Any = None  # of the innermost model: what makes the scores of all layers at once
    model: Any = Converted  # the mixin of a model


parts = Parts()
