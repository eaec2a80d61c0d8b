"""What there is to convert in a model: attention modules and a position table, or why not.

Whatever goes through transformers' attention interface is found by itself; MPNet, ALBERT and the
place of a position table are all that has to be known by name (`core` knows them).
"""

from functools import cache
from inspect import getsource, signature
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tisa.hf.core import (
    attention_modules,
    group_of,
    is_albert,
    is_mpnet,
    num_heads,
    passes,
    place_of_table,
)
from tisa.shapes import Float, Tensor

__all__ = [
    "FUSED_TYPES", "LOADED_TYPES", "Table", "attention_calls", "attention_modules", "is_albert",
    "is_rotary", "num_heads", "passes", "position_table", "reason_against",
]  # fmt: skip
LOADED_TYPES = (
    "albert", "bert", "camembert", "distilbert", "electra", "gpt2", "llama", "mistral",
    "modernbert", "mpnet", "opt", "qwen2", "qwen3", "roberta", "xlm-roberta",
)  # fmt: skip
# Their attention is none of transformers' interface, and tisa.hf.fuse has code for it.
FUSED_TYPES = ("bloom", "falcon", "mpnet", "mpt")
LAYER = (
    "its word vectors go through a layer before position vectors are added to them, and cannot "
    "hold those"
)
# What has a table that cannot be replaced.
UNFIT = {
    "BlenderbotSmallDecoder": "its position vectors are added after a normalisation of the word "
    "vectors, which cannot hold them",
    "MobileBertEmbeddings": LAYER,
    "RoCBertEmbeddings": LAYER,
    "Aimv2TextModel": 'where no token is hidden its "sdpa" sees later tokens and its "eager" does '
    "not, and scores can be fitted to one of them alone",
}
# So sparse attention asks for what understands its mask.
PICKED = '_attn_implementation in ("eager", "sdpa")'


class Table(NamedTuple):
    """A learned position table: the module that holds it, its name there, the row of position 0."""

    parent: Any
    name: str
    first_row: int

    @property
    def embedding(self) -> nn.Embedding:
        """Return the table itself."""
        found = getattr(self.parent, self.name)
        assert isinstance(found, nn.Embedding)
        return found


def attention_calls(model: PreTrainedModel) -> list[tuple[Any, int]]:
    """Return the attention modules in the order of a forward pass's calls, each with its pass.

    ALBERT goes through the same modules in many passes; elsewhere all are of pass 0.
    """
    modules = attention_modules(model)
    if not is_albert(model):
        return [(module, 0) for module in modules]
    calls = []
    inner = len(modules) // model.config.num_hidden_groups
    for index in range(passes(model)):
        first = group_of(model.config, index) * inner
        calls += [(module, index) for module in modules[first : first + inner]]
    return calls


def position_table(model: PreTrainedModel) -> Table | None:
    """Return the model's learned position table, or None."""
    place = place_of_table(model)
    return None if place is None else Table(*place, _first_row(place[0], getattr(*place)))


def has_offset_table(model: PreTrainedModel) -> bool:
    """Return whether the model has a learned score of the offset of its own, as MPNet has."""
    return _has_mpnet(model)


def is_causal(model: PreTrainedModel) -> bool:
    """Return whether a token of the model sees none that comes later."""
    return any(getattr(module, "is_causal", False) for module in attention_modules(model))


def has_window(model: PreTrainedModel) -> bool:
    """Return whether layers of the model have a window of their own."""
    kinds = getattr(model.config, "layer_types", None) or ()
    return any("sliding" in kind or "chunked" in kind for kind in kinds) or bool(
        getattr(model.config, "sliding_window", None)
    )


def table_rows(model: PreTrainedModel) -> Float[Tensor, "positions dim"]:
    """Return the vectors of the positions from 0 on, of a model that has a learned table."""
    table = position_table(model)
    assert table is not None
    return table.embedding.weight.detach()[table.first_row :]


def is_rotary(model: PreTrainedModel) -> bool:
    """Return whether queries and keys are rotated."""
    return any("rotary" in type(m).__name__.lower() for m in model.modules())


def reason_against(model: PreTrainedModel, positions: str) -> str | None:
    """Return why the model cannot be converted, or None where it can."""
    if getattr(model, "config", None) is None or not hasattr(model, "base_model"):
        return (
            f"{type(model).__name__} is no transformers model with a config; load it with "
            "AutoModel.from_pretrained, or put tisa.TISA into your own attention"
        )
    if getattr(model.config, "tisa", None):
        return "it has scores already; convert the model that it came from"
    if model.config.model_type not in CONFIG_MAPPING:
        return (
            f"its type, {model.config.model_type!r}, is not among those of transformers, and what "
            "is saved of it could not be loaded; put tisa.TISA into its attention"
        )
    if hasattr(model, "peft_config") or hasattr(model, "base_model_torch_dtype"):
        return "it carries adapters; merge them first (merge_and_unload), and add others afterwards"
    if len({p.device for p in model.parameters()}) > 1 or model.device.type == "meta":
        return "its weights are on several devices or on none; load it on one device"
    return (
        _against_input(model)
        or _against_whole(model, positions)
        or _against_attention(model)
        or (_against_replacing(model) if positions != "keep" else None)
        or (_against_extending(model) if positions == "extend" else None)
    )


def _against_input(model: PreTrainedModel) -> str | None:
    takes, name = signature(type(model).forward).parameters, model.main_input_name
    # Parts of Whisper name the whole model's input.
    if name == "input_ids" or (name not in takes and "input_ids" in takes):
        return None
    return (
        f"its input is {name}, not tokens in a row: positions of patches are "
        "two-dimensional, and the offset of their numbers is no distance"
    )


def _against_whole(model: PreTrainedModel, positions: str) -> str | None:
    """Return what can be converted of a model that is several: those have a config each, or one."""
    inner = {
        name: m for name, m in model.named_modules() if name and isinstance(m, PreTrainedModel)
    }
    if "decoder_input_ids" in signature(type(model).forward).parameters:
        what = "an encoder with a decoder"
    elif any(type(m.config) is not type(model.config) for m in inner.values()):
        what = "several models in one"
    else:
        return None
    for kept in dict.fromkeys((positions, "keep")):
        found: list[str] = []
        for name, m in inner.items():
            within = any(name.startswith(f"{other}.") for other in found)
            if not within and reason_against(m, kept) is None:
                found.append(name)
        if found:
            how = f', positions="{kept}"' * (kept != positions)
            ways = " or ".join(f"tisa.hf.convert(model.{name}{how})" for name in found)
            return f"it is {what}; convert a part alone: {ways}"
    return f"it is {what}, and no part can be converted alone"


def _against_attention(model: PreTrainedModel) -> str | None:
    if not attention_modules(model):
        return (
            f"no attention of {type(model).__name__} goes through transformers' attention "
            "interface, so nothing would add the scores"
        )
    if any(PICKED in _source(type(m)) for m in attention_modules(model)):
        return (
            'an index picks the keys that its queries see, in code for "eager" and "sdpa" alone, '
            "and attention with scores is neither"
        )
    if not _has_mpnet(model) and any(
        hasattr(m, "relative_attention_bias") for m in model.modules()
    ):
        return "its attention has a relative table of its own, as T5's, and would lose it"
    if not _has_words(model):
        return f"{type(model).__name__} has no table of word embeddings as its input"
    if getattr(model.config, "reorder_and_upcast_attn", False):
        return "reorder_and_upcast_attn goes around the attention interface; set it to False"
    return None


def _against_replacing(model: PreTrainedModel) -> str | None:
    if is_rotary(model):
        return (
            "its positions are rotations of queries and keys inside every layer, and no table to "
            'leave out; positions="keep" adds scores to them'
        )
    if position_table(model) is None:
        return 'it has no learned position table; positions="keep" adds scores'
    names = (type(m).__name__ for m in model.modules())
    unfit = next((UNFIT[name] for name in names if name in UNFIT), None)
    return unfit and f'{unfit}; positions="keep" adds scores'


def _against_extending(model: PreTrainedModel) -> str | None:
    table = position_table(model)
    if table is None or type(table.embedding) is nn.Embedding:
        return None
    return (
        f"{type(table.embedding).__name__} counts its places by itself, and vectors stand for a "
        'plain table alone; positions="replace" leaves it out, positions="keep" adds scores'
    )


@cache
def _source(cls: type) -> str:
    try:
        return getsource(cls)
    except (OSError, TypeError):
        return ""


def _has_mpnet(model: PreTrainedModel) -> bool:
    return any(is_mpnet(module) for module in model.modules())


def _has_words(model: PreTrainedModel) -> bool:
    try:
        return isinstance(model.get_input_embeddings(), nn.Embedding)
    except (RuntimeError, AttributeError):
        return False


def _first_row(parent: Any, table: nn.Embedding) -> int:
    if hasattr(table, "offset"):
        return int(table.offset)
    # RoBERTa and its kin count positions from the padding token's row on.
    made_from_ids = hasattr(parent, "create_position_ids_from_input_ids") or hasattr(
        parent, "create_position_ids_from_inputs_embeds"
    )
    padding = getattr(parent, "padding_idx", None)
    return int(padding) + 1 if made_from_ids and padding is not None else 0
