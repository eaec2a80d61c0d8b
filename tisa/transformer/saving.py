"""A model in a folder: `model.safetensors` and `config.json`."""

import json
from pathlib import Path

import torch
from torch import nn

from tisa.packages import needed
from tisa.positions import Asked
from tisa.store import (
    MANIFEST,
    Damaged,
    check_folder,
    renewed,
    seal_folder,
    write_bytes,
    write_text,
)
from tisa.store.seals import FOLDER_REMEDY
from tisa.transformer.before import as_meant
from tisa.transformer.config import TransformerConfig
from tisa.transformer.language_model import LanguageModel
from tisa.transformer.model import Transformer
from tisa.weights import FLOATS, Checkpoint, Tensors, refuse_links

WEIGHTS, CONFIG = "model.safetensors", "config.json"
# 1 had no manifest; before 3 some methods had other defaults.
FORMAT, KIND = 3, "transformer"
# Where `torch.compile` puts the model, or the part of it, that it was given.
COMPILED = "_orig_mod"
# In the config file too, for Hugging Face's Auto classes (`tisa.hf`).
HF_MODEL_TYPE = "tisa-transformer"
MODELS: dict[str, type[Transformer] | type[LanguageModel]] = {
    "Transformer": Transformer,
    "LanguageModel": LanguageModel,
}


def save(model: nn.Module, folder: str | Path) -> None:
    """Write a model's weights and its config into a folder, whole or not at all.

    The model is a `Transformer` or a `LanguageModel`; of a compiled model, the original is written.
    """
    safetensors = needed("safetensors.torch", "saved models", "tisa[hf]")
    model = getattr(model, COMPILED, model)
    if not isinstance(model, (Transformer, LanguageModel)) or type(model).__name__ not in MODELS:
        raise TypeError(
            f"model must be a {' or a '.join(MODELS)} itself, which `load` knows, got "
            f"{type(model).__name__}; pass it without what is around it"
        )
    written = {
        "format": FORMAT,
        "model": type(model).__name__,
        "config": model.config.to_dict(),
        "model_type": HF_MODEL_TYPE,
        "architectures": [_architecture(model)],
    }
    state = {
        name.replace(f"{COMPILED}.", ""): value.detach().contiguous()
        for name, value in model.state_dict().items()
    }
    with renewed(folder, mark=MANIFEST) as out:
        write_bytes(out / WEIGHTS, safetensors.save(state, metadata={"format": "pt"}))
        write_text(out / CONFIG, json.dumps(written, indent=2) + "\n")
        # Last: where a folder is written in place, the one of before says that it is not whole.
        seal_folder(out, KIND, {"model": written["model"]}, (WEIGHTS, CONFIG))


def load(
    folder: str | Path,
    *,
    device: str | torch.device = "cpu",
    position: Asked | None = None,
) -> Transformer | LanguageModel:
    """Return the model that was saved in a folder, with its weights, in evaluation mode.

    Args:
        folder: what `save` wrote.
        device: where it is to compute.
        position: the class of its position method where that is none of this package: the class, or
            "my_file.py:Class". A class that is imported or registered is found without. The folder
            says where the class came from, and no file is run because a folder names it.
    """
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} must be a folder written by tisa.transformer.save, got no {name} in it"
            )
    try:
        written = json.loads((folder / CONFIG).read_text())
        format_, kind, values = (written[name] for name in ("format", "model", "config"))
    except (ValueError, KeyError, TypeError) as broken:
        raise ValueError(
            f"{folder / CONFIG} is not a config of tisa.transformer: {broken}; {FOLDER_REMEDY}"
        ) from None
    if format_ not in range(1, FORMAT + 1) or kind not in MODELS:
        raise ValueError(
            f"{folder / CONFIG} must have format {FORMAT} and a model of {', '.join(MODELS)}, got "
            f"{format_} and {kind}; written by a newer version of tisa?"
        )
    if check_folder(folder, KIND) is None and format_ > 1:
        raise Damaged(
            f"{folder}: its {MANIFEST} is missing, so that nothing proves it; {FOLDER_REMEDY}"
        )
    refuse_links(folder)
    files = (folder / WEIGHTS,)
    state = Checkpoint(folder.name, written, Tensors(files), folder, files).tensors
    config = TransformerConfig.from_dict(as_meant(values, format_), position=position)
    # Without memory: a size that the weights do not bear out takes none.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        expected = MODELS[kind](config).state_dict()
    if set(state) != set(expected):
        missing, unexpected = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
        raise ValueError(
            f"{folder / WEIGHTS} must have the weights that its config asks for; missing: "
            f"{missing[:5]}, unexpected: {unexpected[:5]}"
        )
    for name, value in expected.items():
        shape, dtype = state.entries[name]
        if value.shape != shape or dtype not in FLOATS:
            raise ValueError(
                f"{folder / WEIGHTS}: {name} must be numbers of shape {tuple(value.shape)} by its "
                f"config, got {dtype} of shape {shape}"
            )
    model = MODELS[kind](config)
    if all(dtype == "float64" for _, dtype in state.entries.values()):
        # Scoring functions compute in what the module was moved to, not in what its weights are.
        model.double()
    # Copies: the file may be written anew while the model is used.
    model.load_state_dict({name: state[name].clone() for name in state}, assign=True)
    return model.to(device).eval()


def _architecture(model: Transformer | LanguageModel) -> str:
    """Return the name of the class in `tisa.hf` that holds such a model."""
    if isinstance(model, Transformer):
        return "TisaTransformerModel"
    kind = "CausalLM" if model.config.is_causal else "MaskedLM"
    return f"TisaTransformerFor{kind}"
