"""What there is to convert in a model: attention modules and a position table, or why not.

Whatever goes through transformers' attention interface is found by itself; MPNet, ALBERT and the
place of a position table are all that has to be known by name (`core` knows them).
"""

from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from tisa.hf.core import (
    attention_modules,
    group_of,
    is_albert,
    is_mpnet,
    num_heads,
    passes,
    place_of_table,
)

__all__ = ["LOADED_TYPES", "Table", "attention_calls", "attention_modules", "is_albert",
           "is_rotary", "num_heads", "passes", "position_table", "reason_against"]  # fmt: skip
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


def _first_row(parent: Any, table: nn.Embedding) -> int:
    if hasattr(table, "offset"):
        return int(table.offset)
    # RoBERTa and its kin count positions from the padding token's row on.
    made_from_ids = hasattr(parent, "create_position_ids_from_input_ids") or hasattr(
        parent, "create_position_ids_from_inputs_embeds"
    )
    padding = getattr(parent, "padding_idx", None)
    return int(padding) + 1 if made_from_ids and padding is not None else 0
