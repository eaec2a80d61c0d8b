"""A transformers model with translation-invariant self-attention, for those without the package.

Loaded by `AutoModel….from_pretrained(folder, trust_remote_code=True)`; needs torch and transformers
alone. Every attention head adds f(key − query) = Σ a·exp(−|b|·(k − c)²) to its logits. With "eager"
and "sdpa" attention only, and a dense bias; `pip install tisa` has fused kernels, fitting and more.
"""

import inspect
import sys
from contextlib import contextmanager
from functools import cache

import torch
from torch import nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FORMAT = 1
TABLES = ("position_embeddings", "wpe", "embed_positions", "position_embedding")


class Scores(nn.Module):
    """f(k) of each head, float32 whatever the model's dtype is."""

    def __init__(self, heads, kernels):
        super().__init__()
        for name in ("kernel_amplitudes", "kernel_sharpness", "kernel_offsets"):
            self.register_parameter(name, nn.Parameter(torch.zeros(heads, kernels)))

    def forward(self, queries, keys, start=None):
        i = torch.arange(queries, device=self.kernel_offsets.device)[:, None]
        j = torch.arange(keys, device=self.kernel_offsets.device)
        k = (j - i - (keys - queries if start is None else start)).float()[None, None]
        a, b, c = (
            p.float()[..., None, None]
            for p in (self.kernel_amplitudes, self.kernel_sharpness, self.kernel_offsets)
        )
        return (a * torch.exp(-b.abs() * (k - c) ** 2)).sum(1)

    def _apply(self, fn, recurse=True):
        def kept(tensor):
            moved = fn(tensor)
            half = moved.dtype in (torch.float16, torch.bfloat16)
            return tensor.to(device=moved.device, dtype=torch.float32) if half else moved

        return super()._apply(kept, recurse)


class View:
    """A model's config as its attention modules see it: with the functions below."""

    def __init__(self, config):
        self.__dict__["config"] = config

    def __getattr__(self, name):
        value = getattr(self.__dict__["config"], name)
        if name != "_attn_implementation":
            return value
        if value not in (None, "eager", "sdpa"):
            raise ValueError(
                f'attn_implementation: "{value}" would ignore the position scores of this model; '
                'take "eager" or "sdpa", or install the package tisa'
            )
        return f"tisa-remote|{value or 'sdpa'}"


class OwnScores(nn.Module):
    """An attention module that owns its scores."""

    @property
    def config(self):
        return View(self.__dict__["_model_config"])

    @config.setter
    def config(self, config):
        self.__dict__["_model_config"] = config

    def forward(self, *args, **kwargs):
        past = next((x for x in (*args, *kwargs.values()) if isinstance(x, Cache)), None)
        past = getattr(past, "self_attention_cache", past)
        index = getattr(self, "layer_idx", None) or 0
        layers = getattr(past, "layers", None) or []
        if index < len(layers) and getattr(layers[index], "is_compileable", False):
            seen = past.get_seq_length(index)
            kwargs["tisa_query_start"] = seen.clone() if torch.is_tensor(seen) else seen
        return super().forward(*args, **kwargs)


class MPNetScores(OwnScores):
    """MPNet's attention, which takes a bias of its own."""

    def forward(self, hidden_states, attention_mask=None, position_bias=None, *args, **kwargs):
        length = hidden_states.shape[1]
        bias = self.offset_scores[0](length, length).to(hidden_states.dtype)[None]
        keep = position_bias is not None and self.keeps_relative_bias
        bias = position_bias + bias if keep else bias
        mask = additive(attention_mask, hidden_states.dtype)
        return super(OwnScores, self).forward(hidden_states, mask, bias, *args, **kwargs)


class Passes(nn.Module):
    """ALBERT's stack, which tells its one layer in which pass it is."""

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        hidden_states = self.embedding_hidden_mapping_in(hidden_states)
        layers, groups = self.config.num_hidden_layers, self.config.num_hidden_groups
        for i in range(layers):
            group = self.albert_layer_groups[int(i / (layers / groups))]
            hidden_states = group(hidden_states, attention_mask, tisa_pass=i, **kwargs)
        return BaseModelOutput(last_hidden_state=hidden_states)


class NoPositions(nn.Module):
    """What stands where a position table was."""

    def forward(self, *args, **kwargs):
        given = next(x for x in (*args, *kwargs.values()) if torch.is_tensor(x))
        return torch.zeros((), device=given.device)


class NoBias(nn.Module):
    """What stands where MPNet's relative table was."""

    def forward(self, buckets):
        return torch.zeros((*buckets.shape, 1), device=buckets.device)


class Folded(nn.Module):
    """Word embeddings with what of the positions had nothing to do with order."""

    def forward(self, input):
        kind = (input == self.last_token_id).long() + 2 * (input == self.first_token_id).long()
        return super().forward(input) + self.fold[kind.clamp(max=2)]


def additive(mask, dtype):
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)


def biased(module, query, key, mask, kwargs):
    queries, keys = query.shape[-2], key.shape[-2]
    number = kwargs.get("tisa_pass", 0) if len(module.offset_scores) > 1 else 0
    start = kwargs.get("tisa_query_start")
    bias = module.offset_scores[number](queries, keys, start).to(query.dtype)[None]
    lowest = torch.finfo(query.dtype).min
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", False) if causal is None else causal
    if causal and mask is None and queries > 1:
        i = torch.arange(queries, device=query.device)[:, None]
        i = i + (keys - queries if start is None else start)
        bias = bias.masked_fill(torch.arange(keys, device=query.device) > i, lowest)
    if mask is not None:
        bias = bias + additive(mask, query.dtype)[..., :keys]
    segments = kwargs.get("tisa_segments")
    if segments is not None and queries == keys == segments.shape[-1]:
        apart = segments[:, None, :, None] != segments[:, None, None, :]
        bias = bias.masked_fill(apart, lowest)
    return bias.clamp_min(lowest)


def eager(module, query, key, value, attention_mask, **kwargs):
    function = next(
        f
        for cls in type(module).__mro__
        if (f := getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None))
    )
    mask = biased(module, query, key, attention_mask, kwargs)
    return function(module, query, key, value, mask, **kwargs)


def sdpa(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    if kwargs.get("tisa_weights"):
        return eager(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
                     **kwargs)  # fmt: skip
    mask = biased(module, query, key, attention_mask, kwargs)
    return sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=False
    )


AttentionInterface.register("tisa-remote|eager", eager)
AttentionInterface.register("tisa-remote|sdpa", sdpa)


@cache
def mixed(mixin, cls):
    return type(cls.__name__, (mixin, cls), {"__module__": __name__, "stock": cls})


def become(module, mixin):
    config = module.__dict__.pop("config", None)
    module.__class__ = mixed(mixin, type(module))
    if config is not None:
        module.config = config


def is_mpnet(module):
    return any(cls.__name__ == "MPNetSelfAttention" for cls in type(module).__mro__)


def owns_scores(module):
    name = type(module).__name__
    if "Attention" not in name or "Cross" in name or getattr(module, "is_cross_attention", False):
        return False
    try:
        source = inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return False
    return is_mpnet(module) or ("ALL_ATTENTION_FUNCTIONS" in source and "self.config" in source)


def announce(module, args, kwargs):
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    given = dict(zip(names, args, strict=False)) | kwargs
    told = {}
    if given.get("output_attentions"):
        told["tisa_weights"] = True
    places, mask = given.get("position_ids"), given.get("attention_mask")
    # A mask with four dimensions says itself who sees whom.
    if places is not None and places.ndim == 2 and getattr(mask, "ndim", 2) != 4:
        told["tisa_segments"] = (places.diff(dim=-1, prepend=places[:, :1] - 1) != 1).cumsum(-1)
    if module.config.tisa["base_model_type"] != "mpnet":
        return args, kwargs | told
    if "tisa_segments" in told:
        # MPNet passes nothing on; a mask with four dimensions it takes as it is.
        segments = told["tisa_segments"]
        same = segments[:, None, :, None] == segments[:, None, None, :]
        same = same if mask is None else same & mask[:, None, None, :].bool()
        kwargs = kwargs | {"attention_mask": additive(same, module.dtype)}
        args = args[: names.index("attention_mask")]
    return args, kwargs


def no_position_ids(module, args, kwargs):
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    given = dict(zip(names, args, strict=False)) | kwargs
    tokens = given.get("input_ids")
    tokens = given["inputs_embeds"][..., 0] if tokens is None else tokens
    given["position_ids"] = torch.zeros_like(tokens[:1], dtype=torch.long)
    return (), given


def attach(model):
    config, tisa = model.config, model.config.tisa
    albert = tisa["base_model_type"] == "albert"
    passes = config.num_hidden_layers if albert and not tisa["shared"] else 1
    for module in [m for m in model.modules() if owns_scores(m)]:
        heads = next(
            h
            for n in ("num_attention_heads", "num_heads", "n_heads")
            if isinstance(h := getattr(module, n, None) or getattr(config, n, None), int)
        )
        become(module, MPNetScores if is_mpnet(module) else OwnScores)
        module.config = config
        module.keeps_relative_bias = tisa["positions"] == "keep"
        module.offset_scores = nn.ModuleList(
            Scores(heads, tisa["num_kernels"]) for _ in range(passes)
        )
    for module in list(model.modules()):
        if hasattr(module, "albert_layer_groups"):
            become(module, Passes)
    if tisa["positions"] == "replace":
        parent, name = next(
            (m, n) for m in model.modules() for n in TABLES
            if isinstance(getattr(m, n, None), nn.Embedding)
        )  # fmt: skip
        setattr(parent, name, NoPositions())
        if hasattr(parent, "position_ids"):
            parent.register_forward_pre_hook(no_position_ids, with_kwargs=True)
        for module in model.modules():
            if hasattr(module, "relative_attention_bias"):
                module.relative_attention_bias = NoBias()
        if tisa["fold"]:
            words = model.get_input_embeddings()
            become(words, Folded)
            words.first_token_id = tisa["first_token_id"]
            words.last_token_id = tisa["last_token_id"]
            words.fold = nn.Parameter(torch.zeros(3, words.embedding_dim, dtype=words.weight.dtype))
    innermost = [m for m in model.modules() if isinstance(m, PreTrainedModel)][-1]
    innermost.register_forward_pre_hook(announce, with_kwargs=True)


@contextmanager
def small_table(config):
    limit = config.max_position_embeddings
    sines = getattr(config, "sinusoidal_pos_embds", None)
    if config.tisa["positions"] == "replace":
        config.max_position_embeddings = max(16, (config.pad_token_id or 0) + 2)
        if sines:
            config.sinusoidal_pos_embds = False
    try:
        yield
    finally:
        config.max_position_embeddings = limit
        if sines:
            config.sinusoidal_pos_embds = sines


class TisaModelMixin(PreTrainedModel):
    """A stock model with what its config says: scores, and no positions."""

    _keep_in_fp32_modules_strict = {"offset_scores"}  # noqa: RUF012

    def __init__(self, config, *args, **kwargs):
        with small_table(config):
            super().__init__(config, *args, **kwargs)
        attach(self)

    def initialize_weights(self):
        with small_table(self.config):
            super().initialize_weights()


@cache
def config_class(stock):
    kind = f"tisa-{stock.model_type}"
    return type(f"Tisa{stock.__name__}", (stock,), {"__module__": __name__, "model_type": kind})


@cache
def model_class(stock, config):
    made = {"__module__": __name__, "config_class": config}
    return type(f"Tisa{stock.__name__}", (TisaModelMixin, stock), made)


class TisaConfig(PreTrainedConfig):
    """Reads the config of any converted model."""

    @classmethod
    def from_pretrained(cls, name, **kwargs):
        values, _ = PreTrainedConfig.get_config_dict(name, **kwargs)
        if values["tisa"]["format"] > FORMAT:
            raise ValueError(f"written in format {values['tisa']['format']}: install a newer tisa")
        kwargs.pop("trust_remote_code", None)
        stock = CONFIG_MAPPING[values["tisa"]["base_model_type"]]
        return config_class(stock).from_pretrained(name, **kwargs)


def loader(auto):
    """Return what an Auto class calls: it loads the converted form of the class it would give."""

    class Loader:
        @classmethod
        def from_pretrained(cls, name, *args, config=None, **kwargs):
            stock_config = CONFIG_MAPPING[config.tisa["base_model_type"]]
            stock = getattr(modeling_auto, auto)._model_mapping[stock_config]
            stock = stock[0] if isinstance(stock, tuple) else stock
            made = model_class(stock, type(config))
            return made.from_pretrained(name, *args, config=config, **kwargs)

        @classmethod
        def register_for_auto_class(cls, auto_class="AutoModel"):
            pass

    return Loader


for _name in modeling_auto.__all__:
    if _name.startswith("AutoModel"):
        globals()[_name.replace("Auto", "Tisa", 1)] = loader(_name)
