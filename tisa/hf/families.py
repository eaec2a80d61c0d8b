"""What there is to convert in a model: attention modules and a position table, or why not.

Whatever goes through transformers' attention interface is found by itself; MPNet, ALBERT and the
place of a position table are all that has to be known by name.
"""

import inspect
from functools import cache
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

# Under these names a learned position table is found; `Table.first_row` is where position 0 is.
TABLES = ("position_embeddings", "wpe", "embed_positions", "position_embedding")
LOADED_TYPES = (
    "albert", "bert", "camembert", "distilbert", "electra", "gpt2", "llama", "mistral",
    "modernbert", "mpnet", "opt", "qwen2", "qwen3", "roberta", "xlm-roberta",
)  # fmt: skip


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


def attention_modules(model: PreTrainedModel) -> list[Any]:
    """Return the self-attention modules that can own scores, in the order of the layers."""
    return [m for m in model.modules() if _can_own_scores(m)]


def position_table(model: PreTrainedModel) -> Table | None:
    """Return the model's learned position table, or None."""
    for parent in model.modules():
        for name in TABLES:
            found = getattr(parent, name, None)
            if isinstance(found, nn.Embedding):
                return Table(parent, name, _first_row(parent, found))
    return None


def num_heads(module: Any, config: Any) -> int:
    """Return how many query heads the attention module has."""
    for name in ("num_attention_heads", "num_heads", "n_heads"):
        if isinstance(getattr(module, name, None), int):
            return getattr(module, name)
    return int(config.num_attention_heads)


def passes(model: PreTrainedModel) -> int:
    """Return how often each attention module is gone through: ALBERT's passes, 1 elsewhere."""
    return int(model.config.num_hidden_layers) if is_albert(model) else 1


def is_albert(model: PreTrainedModel) -> bool:
    """Return whether the model is an ALBERT, which shares one layer's weights."""
    return str(model.config.model_type).removeprefix("tisa-") == "albert"


def is_rotary(model: PreTrainedModel) -> bool:
    """Return whether queries and keys are rotated."""
    return any("rotary" in type(m).__name__.lower() for m in model.modules())


def reason_against(model: PreTrainedModel, positions: str) -> str | None:
    """Return why the model cannot be converted, or None where it can."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "base_model"):
        return (
            f"{type(model).__name__} is no transformers model with a config; load it with "
            "AutoModel.from_pretrained, or put tisa.TISA into your own attention"
        )
    if getattr(config, "tisa", None):
        return "it has scores already; convert the model that it came from"
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        return (
            f"its input is {model.main_input_name}, not tokens in a row: positions of patches are "
            "two-dimensional, and the offset of their numbers is no distance"
        )
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder with a decoder is not supported; convert its encoder alone"
    if hasattr(model, "peft_config") or hasattr(model, "base_model_torch_dtype"):
        return "it carries adapters; merge them first (merge_and_unload), and add others afterwards"
    if len({p.device for p in model.parameters()}) > 1 or model.device.type == "meta":
        return "its weights are on several devices or on none; load it on one device"
    if not attention_modules(model):
        return (
            f"no attention of {type(model).__name__} goes through transformers' attention "
            "interface, so nothing would add the scores"
        )
    if not _has_mpnet(model) and any(
        hasattr(m, "relative_attention_bias") for m in model.modules()
    ):
        return "its attention has a relative table of its own, as T5's, and would lose it"
    if not _has_words(model):
        return f"{type(model).__name__} has no table of word embeddings as its input"
    if getattr(config, "reorder_and_upcast_attn", False):
        return "reorder_and_upcast_attn goes around the attention interface; set it to False"
    if positions == "replace" and is_rotary(model):
        return (
            "its positions are rotations of queries and keys inside every layer, and no table to "
            'leave out; positions="keep" adds scores to them'
        )
    if positions == "replace" and position_table(model) is None:
        return 'it has no learned position table; positions="keep" adds scores'
    return None


def _has_mpnet(model: PreTrainedModel) -> bool:
    return any(is_mpnet(module) for module in model.modules())


def _has_words(model: PreTrainedModel) -> bool:
    try:
        return isinstance(model.get_input_embeddings(), nn.Embedding)
    except (RuntimeError, AttributeError):
        return False


def is_mpnet(module: Any) -> bool:
    """Return whether the attention module is MPNet's, which has its own way."""
    return any(cls.__name__ == "MPNetSelfAttention" for cls in type(module).__mro__)


def _can_own_scores(module: Any) -> bool:
    if getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__:
        return False
    return is_mpnet(module) or _uses_interface(type(module))


@cache
def _uses_interface(cls: Any) -> bool:
    stock = getattr(cls, "stock", cls)
    if "Attention" not in stock.__name__:
        return False
    try:
        source = inspect.getsource(stock.forward)
    except (OSError, TypeError):
        return False
    return "ALL_ATTENTION_FUNCTIONS" in source and "self.config" in source


def _first_row(parent: Any, table: nn.Embedding) -> int:
    if hasattr(table, "offset"):
        return int(table.offset)
    # RoBERTa and its kin count positions from the padding token's row on.
    made_from_ids = hasattr(parent, "create_position_ids_from_input_ids") or hasattr(
        parent, "create_position_ids_from_inputs_embeds"
    )
    padding = getattr(parent, "padding_idx", None)
    return int(padding) + 1 if made_from_ids and padding is not None else 0
