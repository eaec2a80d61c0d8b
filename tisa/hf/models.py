"""Config and model types of converted models, and their registration with the Auto classes.

For a stock class there is one subclass, `TisaBertModel` for `BertModel`, whose config is a subclass
too and has a model type of its own, "tisa-bert": a stock class would drop the scores as unexpected
weights. They are made on demand. What a model was given is in its config under `tisa`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tisa.hf import attention, families
from tisa.hf.modules import Folded, MPNetScores, NoPositions, OwnScores, Passes, become
from tisa.hf.together import Together
from tisa.scoring import TISA, ScoringFunction
from tisa.shapes import Tensor

# Written into every config; a higher one is of a newer package.
FORMAT = 1
# No limit: more tokens than fit any memory.
LIFTED = 2**20
# The table of a model with replaced positions is made only to be thrown away.
_SMALL = 16


class TisaModel(PreTrainedModel):
    """Mixin: a transformers model whose attention modules own scores of the offset."""

    _keep_in_fp32_modules_strict = {"offset_scores"}  # noqa: RUF012

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        check_format(config)
        with _small_table(config):
            super().__init__(config, *args, **kwargs)
        attach(self)

    def initialize_weights(self) -> None:
        """Set what no checkpoint has, in the size in which it was made."""
        with _small_table(self.config):
            super().initialize_weights()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the model from a folder or the hub; one that lacks scores is an error."""
        wanted = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        missing = [k for k in info["missing_keys"] if "offset_scores" in k or k.endswith(".fold")]
        if missing:
            raise ValueError(
                f"{args[0] if args else cls.__name__}: the checkpoint lacks the position scores "
                f"({', '.join(sorted(missing)[:3])} and so on, {len(missing)} tensors); "
                "take a whole one, or convert the stock model with tisa.hf.convert"
            )
        return (model, info) if wanted else model

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Save like any other model; code for people without this package and a card beside it."""
        from tisa.hf.card import write_card, write_remote_code

        super().save_pretrained(save_directory, **kwargs)
        if kwargs.get("is_main_process", True):
            write_remote_code(self, save_directory)
            write_card(self, save_directory)

    def _upload_modified_files(self, working_dir: Any, *args: Any, **kwargs: Any) -> Any:
        from tisa.hf.card import replace_template

        replace_template(self, working_dir)
        return super()._upload_modified_files(working_dir, *args, **kwargs)

    def _init_weights(self, module: Any) -> None:
        if isinstance(module, ScoringFunction):
            if not all(getattr(p, "_is_hf_initialized", False) for p in module.parameters()):
                module.reset_parameters()  # type: ignore[operator]
        elif not isinstance(module, NoPositions):
            super()._init_weights(module)

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> str:
        attention.own_name(attn_implementation)
        if attn_implementation is None:
            return "tisa"
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)


@contextmanager
def _small_table(config: PreTrainedConfig) -> Iterator[None]:
    """Have stock code make few positions where they are replaced, and set none of them.

    GPT-BigCode squares their number, DistilBERT may set a table of sines.
    """
    sines = getattr(config, "sinusoidal_pos_embds", None)
    limit = config.max_position_embeddings
    if config.tisa["positions"] == "replace":
        config.max_position_embeddings = max(_SMALL, (config.pad_token_id or 0) + 2)
        if sines:
            config.sinusoidal_pos_embds = False
    try:
        yield
    finally:
        config.max_position_embeddings = limit
        if sines:
            config.sinusoidal_pos_embds = sines


def check_format(config: PreTrainedConfig) -> None:
    """Refuse a config that is not ours, or that a newer package wrote."""
    tisa = getattr(config, "tisa", None)
    if not isinstance(tisa, dict) or "format" not in tisa:
        raise ValueError(
            f"{type(config).__name__}: no scores are described in it (`tisa`); "
            "make a converted model with tisa.hf.convert"
        )
    if tisa["format"] > FORMAT:
        raise ValueError(
            f"{type(config).__name__}: written in format {tisa['format']}, this package reads up "
            f"to {FORMAT}; upgrade it: pip install --upgrade tisa"
        )


def attach(model: PreTrainedModel) -> None:
    """Give a freshly built stock model what its config says: scores, and no positions."""
    tisa = model.config.tisa
    passes = 1 if tisa["shared"] else families.passes(model)
    owners = families.attention_modules(model)
    for module in owners:
        heads = families.num_heads(module, model.config)
        become(module, MPNetScores if families.is_mpnet(module) else OwnScores)
        module.config = model.config
        if isinstance(module, MPNetScores):
            module.keeps_relative_bias = tisa["positions"] == "keep"
        module.offset_scores = nn.ModuleList(
            TISA(heads, tisa["num_kernels"], init=tisa["init"]) for _ in range(passes)
        )
    if families.is_albert(model):
        for module in list(model.modules()):
            if hasattr(module, "albert_layer_groups"):
                become(module, Passes)
    if tisa["positions"] == "replace":
        _remove_positions(model)
    innermost = [m for m in model.modules() if isinstance(m, PreTrainedModel)][-1]
    innermost.tisa_owners = owners
    innermost.register_forward_pre_hook(_announce, with_kwargs=True)


def _remove_positions(model: PreTrainedModel) -> None:
    table = families.position_table(model)
    assert table is not None
    setattr(table.parent, table.name, NoPositions())
    for module in model.modules():
        if hasattr(module, "relative_attention_bias"):
            # MPNet's; the scores were fitted to it too.
            module.relative_attention_bias = _NoBias()
    if hasattr(table.parent, "position_ids"):
        table.parent.register_forward_pre_hook(_no_position_ids, with_kwargs=True)
    tisa = model.config.tisa
    if tisa["fold"]:
        words: Any = model.get_input_embeddings()
        become(words, Folded)
        words.first_token_id, words.last_token_id = tisa["first_token_id"], tisa["last_token_id"]
        words.fold = nn.Parameter(torch.zeros(3, words.embedding_dim, dtype=words.weight.dtype))


class _NoBias(nn.Module):
    """What stands where a relative table was."""

    def forward(self, buckets: Tensor) -> Tensor:
        """Return zeros that can be permuted like the table's rows."""
        return torch.zeros((*buckets.shape, 1), device=buckets.device)


def _announce(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Tell the attention functions what the model was called with and does not pass on to them."""
    names = list(_parameters(type(module)))
    given = dict(zip(names, args, strict=False)) | kwargs
    told: dict[str, Any] = {}
    wanted = given.get("output_attentions")
    if module.config.output_attentions if wanted is None else wanted:
        told["tisa_weights"] = True
    position_ids, mask = given.get("position_ids"), given.get("attention_mask")
    mpnet = module.config.tisa["base_model_type"] == "mpnet"
    # Who says where packed sequences end need not wait for a look at the positions.
    known = given.get("tisa_packed") is not None
    # A mask with four dimensions says itself who sees whom.
    whole = getattr(mask, "ndim", 2) == 4
    if not known and position_ids is not None and position_ids.ndim == 2 and not whole:
        segments = _segments_of(position_ids)
        if segments is not None:
            told["tisa_segments"] = segments
    if known and mpnet and not whole:
        tokens = given.get("input_ids")
        tokens = given["inputs_embeds"] if tokens is None else tokens
        told["tisa_segments"] = attention.packed_segments(given["tisa_packed"][0], tokens.shape[1])
    if not mpnet:
        return args, kwargs | told | _together(module)
    if not told:
        return args, kwargs
    if "tisa_segments" in told:
        # MPNet passes nothing on; a mask with four dimensions it takes as it is.
        same = attention.same_segment(told["tisa_segments"])
        if mask is not None:
            same = same & mask[:, None, None, :].bool()
        kwargs = kwargs | {"attention_mask": attention.additive(same, module.dtype)}
        args = args[: names.index("attention_mask")]
    return args, kwargs


def _together(module: Any) -> dict[str, Any]:
    """Return the means to compute all layers' scores and bands at once, where that is the same."""
    known = module.config.tisa["base_model_type"] in families.LOADED_TYPES
    if torch.compiler.is_compiling() or not known:
        return {}
    # A layer that is computed again in the backward pass needs scores of its own.
    again = module.training and module.is_gradient_checkpointing
    return {"tisa_together": Together(module.tisa_owners, with_vectors=not again)}


@cache
def _parameters(cls: Any) -> tuple[str, ...]:
    import inspect

    return tuple(inspect.signature(cls.forward).parameters)[1:]


def _segments_of(position_ids: Tensor) -> Tensor | None:
    """Return the number of each token's sequence: a new one begins where positions do not go on."""
    steps = position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1)
    restarts = steps != 1
    if not torch.compiler.is_compiling() and not bool(restarts.any()):
        return None
    return restarts.cumsum(-1)


def _no_position_ids(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give the embeddings position 0 for every token, so that no table of places limits them."""
    given = dict(zip(_parameters(type(module)), args, strict=False)) | kwargs
    tokens = given.get("input_ids")
    tokens = given["inputs_embeds"][..., 0] if tokens is None else tokens
    given["position_ids"] = torch.zeros_like(tokens[:1], dtype=torch.long)
    return (), given


def tisa_class(stock: Any) -> Any:
    """Return the converted class of a stock model class."""
    return _made(stock, tisa_config_class(stock.config_class))


@cache
def _made(stock: Any, config: Any) -> Any:
    name = f"Tisa{stock.__name__}"
    made = type(
        name,
        (TisaModel, stock),
        {
            "__module__": __name__,
            "__doc__": f"{stock.__name__} with scores of the offset.",
            "config_class": config,
            "stock": stock,
        },
    )
    globals()[name] = made
    return made


@cache
def tisa_config_class(stock: Any) -> Any:
    """Return the config class of a converted model of that stock config."""
    if stock.model_type.startswith("tisa-"):
        return stock
    name = f"Tisa{stock.__name__}"
    made = type(
        name,
        (stock,),
        {"__module__": __name__, "model_type": f"tisa-{stock.model_type}", "stock": stock},
    )
    globals()[name] = made
    return made


@cache
def register_type(model_type: str) -> None:
    """Register the converted form of a stock model type with every Auto class that knows it."""
    stock_config = CONFIG_MAPPING[model_type]
    config = tisa_config_class(stock_config)
    AutoConfig.register(config.model_type, config, exist_ok=True)
    for name in dir(modeling_auto):
        mapping = getattr(getattr(modeling_auto, name), "_model_mapping", None)
        if not name.startswith("AutoModel") or mapping is None or stock_config not in mapping:
            continue
        stock = mapping[stock_config]
        stock = stock[0] if isinstance(stock, tuple) else stock
        getattr(modeling_auto, name).register(config, tisa_class(stock), exist_ok=True)


def register() -> None:
    """Register attention functions, and the usual model types, so that Auto classes load them."""
    attention.register()
    for model_type in families.LOADED_TYPES:
        if model_type in CONFIG_MAPPING:
            register_type(model_type)
