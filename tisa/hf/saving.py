"""Models from folders, and into them: stock ones in, converted ones in and out."""

import warnings
from pathlib import Path
from typing import Any

from transformers import AutoModel, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tisa.hf.card import seal, write_card
from tisa.hf.core import LIFTED
from tisa.hf.core import model_class as converted_class
from tisa.hf.other_scores import with_scoring
from tisa.hf.registry import (
    Lacking,
    base_class,
    config_of,
    model_classes,
    proved,
    register_type,
    tokenizer_of,
)
from tisa.hf.sentence import copy_sentence_files, sentence_folder
from tisa.positions import Given
from tisa.store import MANIFEST, renewed
from tisa.weights import Checkpoint, read_checkpoint

# Of what `from_pretrained` takes: how the hub's copy is found.
HUB = ("revision", "token", "cache_dir", "local_files_only", "force_download")
# Of a model that another one takes the place of.
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "*.index.json")


def load_stock(
    name: str, *, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, Any, Checkpoint]:
    """Return the model in the class that its config names, its tokenizer or None, and its files.

    Without its head, and a warning says so, where transformers does not have the class or the
    checkpoint no weights for the head, which would be random. What lacks anything else is refused.
    """
    checkpoint = read_checkpoint(name)
    config = config_of(checkpoint, trust_remote_code=trust_remote_code)
    config.name_or_path = name
    base = base_class(config, checkpoint)
    named = (config.architectures or [base.__name__])[0]
    cls = model_classes(type(config)).get(named, base)
    if named != cls.__name__:
        warnings.warn(
            f"{name}: its config names {named}, no class of transformers for such a model; taken "
            "without its head. Load it with your class, and convert it with tisa.hf.convert",
            stacklevel=2,
        )
    try:
        model = proved(cls, config, checkpoint)
    except Lacking as lacking:
        if not lacking.whole_head:
            raise
        model = proved(base, config, checkpoint)
        warnings.warn(
            f"{name}: its config names {named}, but the checkpoint lacks the head's weights "
            f"({lacking.names}); taken without the head, as {type(model).__name__}",
            stacklevel=2,
        )
    return model, tokenizer_of(name, trust_remote_code=trust_remote_code), checkpoint


def load(
    name: str,
    *,
    model_class: Any = None,
    new_head: bool = False,
    scoring: Given | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Return a saved converted model in the class that it was saved in, whatever its type is.

    The Auto classes do the same for the types that are registered with them from the start. Each of
    its parameters is the file's, or it is an error that names what is missing.

    Args:
        name: a folder, or a name on the hub.
        model_class: the class of the model that was converted, where transformers does not have it;
            or another one for it.
        new_head: a head that the file lacks is drawn at random, to be trained.
        scoring: the class of its scores where that is none of this package: the class, or
            "my_file.py:Class". A class that is imported or registered is found without.
        **kwargs: for `from_pretrained`.
    """
    hub = {key: kwargs.pop(key) for key in HUB if key in kwargs}
    checkpoint = read_checkpoint(name, **hub)
    described = checkpoint.config.get("tisa")
    if not isinstance(described, dict) or described.get("base_model_type") not in CONFIG_MAPPING:
        raise ValueError(f"load: {name} is no converted model; make one with tisa.hf.convert")
    stock_config = CONFIG_MAPPING[described["base_model_type"]]
    register_type(described["base_model_type"])
    # A part of a model may have a config of another type than the class that is made of it.
    own = str(checkpoint.config.get("model_type")).removeprefix("tisa-")
    if own in CONFIG_MAPPING:
        register_type(own)
    config = config_of(checkpoint)
    config.name_or_path = str(name)
    with_scoring(config.tisa, scoring)
    stock = str((config.architectures or [""])[0]).removeprefix("Tisa")
    cls = model_class or (model_classes(stock_config).get(stock) if stock else AutoModel)
    if cls is None:
        raise ValueError(
            f"load: {name} is a converted {stock}, a class that transformers does not have; give "
            f"it: tisa.hf.load(…, model_class={stock}), or model_class=AutoModel for the model "
            "without its head"
        )
    # An Auto class knows the converted ones.
    if hasattr(cls, "config_class"):
        made = converted_class(cls)
    else:
        made = cls._model_mapping[type(config)]
    return proved(made, config, checkpoint, new_head=new_head, **kwargs)


def save(
    model: PreTrainedModel, folder: str | Path, *, tokenizer: Any = None, beside: str = ""
) -> None:
    """Save a converted model, its tokenizer, and what makes a sentence encoder of `beside`.

    `beside` is the folder or hub name that the model came from. A model that was saved there before
    stays until the new model is whole. The card, and other files in the folder, are kept.
    """
    origin = sentence_folder(beside) if beside else None
    with renewed(folder, mark=MANIFEST, first=("README.md",), stale=WEIGHTS) as out:
        _save(model, out, tokenizer, origin)


def _save(model: PreTrainedModel, out: Path, tokenizer: Any, origin: Path | None) -> None:
    write_card(model, out, sentences=origin is not None)
    model.save_pretrained(out)
    unlimited = model.config.tisa["positions"] != "keep"
    if tokenizer is not None:
        limit = tokenizer.model_max_length
        if unlimited:
            tokenizer.model_max_length = LIFTED
        try:
            tokenizer.save_pretrained(out)
        finally:
            tokenizer.model_max_length = limit
    if origin is not None:
        copy_sentence_files(origin, out, max_seq_length=LIFTED if unlimited else None)
    seal(model, out)
