"""Models from folders, and into them: stock ones in, converted ones in and out."""

import warnings
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from tisa.hf.card import KIND, seal
from tisa.hf.core import model_class as converted_class
from tisa.hf.registry import LIFTED, register_type
from tisa.hf.sentence import copy_sentence_files, sentence_folder
from tisa.store import check_folder


def load_stock(name: str) -> tuple[PreTrainedModel, Any]:
    """Return the model in the class that its config names, and its tokenizer or None.

    Without its head, and a warning says so, where transformers does not have the class or the
    checkpoint no weights for the head, which would be random.
    """
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise ValueError(
            f"model must be a model's folder or its name on the hub, got {name}, which is no folder"
        )
    config = AutoConfig.from_pretrained(name)
    named = (getattr(config, "architectures", None) or [""])[0]
    cls = getattr(transformers, named, AutoModel)
    if named and not hasattr(transformers, named):
        warnings.warn(
            f"{name}: its config names {named}, a class that transformers does not have; taken "
            "without its head. Load it with your class, and convert it with tisa.hf.convert",
            stacklevel=2,
        )
    try:
        model, info = cls.from_pretrained(name, output_loading_info=True)
    except SafetensorError as broken:
        raise ValueError(
            f"{name}: the weights are truncated or corrupted ({broken}); download them again"
        ) from None
    random_ones = _random_head(model, set(info["missing_keys"]))
    if random_ones:
        model = AutoModel.from_pretrained(name)
        warnings.warn(
            f"{name}: its config names {named}, but the checkpoint lacks the head's weights "
            f"({', '.join(random_ones[:3])}{', …' if len(random_ones) > 3 else ''}); taken without "
            f"the head, as {type(model).__name__}",
            stacklevel=2,
        )
    try:
        return model, AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError):
        return model, None


def _random_head(model: PreTrainedModel, missing: set[str]) -> list[str]:
    """Return the names of parameters outside the base model that no checkpoint gave a value."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # A tied weight is read under one of its names.
    read = {id(p) for key, p in parameters.items() if key not in missing}
    read |= {id(p) for p in model.base_model.parameters()}
    return sorted(k for k in missing & parameters.keys() if id(parameters[k]) not in read)


def load(name: str, *, model_class: Any = None, **kwargs: Any) -> PreTrainedModel:
    """Return a saved converted model in the class that it was saved in, whatever its type is.

    The Auto classes do the same for the types that are registered with them from the start.

    Args:
        name: a folder, or a name on the hub.
        model_class: the class of the model that was converted, where transformers does not have it.
        **kwargs: for `from_pretrained`.
    """
    if Path(name).is_dir():
        # A model that somebody else saved has no manifest.
        check_folder(Path(name), KIND)
    values, _ = PreTrainedConfig.get_config_dict(name)
    described = values.get("tisa")
    if not isinstance(described, dict):
        raise ValueError(f"load: {name} is no converted model; make one with tisa.hf.convert")
    register_type(described["base_model_type"])
    stock = str((values.get("architectures") or [""])[0]).removeprefix("Tisa")
    if model_class is None and stock and not hasattr(transformers, stock):
        raise ValueError(
            f"load: {name} is a converted {stock}, a class that transformers does not have; give "
            f"it: tisa.hf.load(…, model_class={stock}), or model_class=AutoModel for the model "
            "without its head"
        )
    cls = model_class or getattr(transformers, stock or "AutoModel")
    # An Auto class knows the converted ones.
    cls = converted_class(cls) if hasattr(cls, "config_class") else cls
    loaded: PreTrainedModel = cls.from_pretrained(name, **kwargs)
    return loaded


def save(
    model: PreTrainedModel, folder: str | Path, *, tokenizer: Any = None, beside: str = ""
) -> None:
    """Save a converted model, its tokenizer, and what makes a sentence encoder of `beside`.

    `beside` is the folder or hub name that the model came from.
    """
    out = Path(folder)
    model.save_pretrained(out)
    unlimited = model.config.tisa["positions"] == "replace"
    if tokenizer is not None:
        limit = tokenizer.model_max_length
        if unlimited:
            tokenizer.model_max_length = LIFTED
        try:
            tokenizer.save_pretrained(out)
        finally:
            tokenizer.model_max_length = limit
    origin = sentence_folder(beside) if beside else None
    if origin is not None:
        copy_sentence_files(origin, out, max_seq_length=LIFTED if unlimited else None)
    seal(model, out)
