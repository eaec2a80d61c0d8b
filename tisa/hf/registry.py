"""What this package hands to `core`, and converted models among transformers' Auto classes.

For a stock class there is one subclass, `TisaBertModel` for `BertModel`, whose config is a subclass
too and has a model type of its own, "tisa-bert": a stock class would drop the scores as unexpected
weights. `core` makes them on demand.
"""

import os
from functools import cache
from typing import Any

from transformers import AutoConfig
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tisa.hf import core, implementations
from tisa.hf.families import LOADED_TYPES
from tisa.offsets import to_matrix
from tisa.scoring import TISA

# No limit: more tokens than fit any memory.
LIFTED = 2**20


class TisaModel(core.Converted):
    """Mixin: saved with a copy of its code, and a card, for people without this package."""

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Save like any other model, the code and the card beside it."""
        from tisa.hf import card

        super().save_pretrained(save_directory, **kwargs)
        if kwargs.get("is_main_process", True):
            card.write_remote_code(self, save_directory)
            card.write_card(self, save_directory)
            card.seal(self, save_directory, ("*.safetensors", "*.safetensors.index.json"))

    def _upload_modified_files(self, working_dir: Any, *args: Any, **kwargs: Any) -> Any:
        from tisa.hf import card

        card.replace_template(self, working_dir)
        return super()._upload_modified_files(working_dir, *args, **kwargs)


@cache
def register_type(model_type: str) -> None:
    """Register the converted form of a stock model type with every Auto class that knows it."""
    stock_config = CONFIG_MAPPING[model_type]
    config = core.config_class(stock_config)
    AutoConfig.register(config.model_type, config, exist_ok=True)
    for name in dir(modeling_auto):
        if not name.startswith("AutoModel"):
            continue
        stock = core.auto_class(name, stock_config)
        if stock is not None:
            made = core.model_class(stock)
            getattr(modeling_auto, name).register(config, made, exist_ok=True)


def register() -> None:
    """Hand the operator to `core`; register the usual model types with the Auto classes."""
    core.parts = core.Parts(
        scoring=TISA,
        to_matrix=to_matrix,
        functions={
            "tisa": implementations.on_operator,
            "eager": implementations.eager,
            "sdpa": core.sdpa,
            "flex_attention": implementations.flex,
        },
        default="tisa",
        more="",
        mpnet=implementations.mpnet,
        together=implementations.together,
        model=TisaModel,
    )
    core.register()
    # For the model itself, and for modules of it that have no scores; without a mask there is none.
    AttentionInterface.register("tisa", implementations.on_operator)
    AttentionMaskInterface.register("tisa", implementations.mask)
    for model_type in LOADED_TYPES:
        if model_type in CONFIG_MAPPING:
            register_type(model_type)
