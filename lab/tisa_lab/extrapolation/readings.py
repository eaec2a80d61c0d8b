"""Trained models in, the same weights with other options of their position method out.

What a method can do at reading time alone: rotary at other rates (`scaling`, `p`), which needs no
training.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tisa.positions import Chosen, resolve
from tisa.transformer import LanguageModel
from tisa_lab.pretrain.report import label_of

# A folder, its model, and the config of its run with the options that it is read with.
Read = tuple[Path, LanguageModel, dict[str, Any]]


def readings_of(
    runs: list[Path],
    loaded: list[tuple[LanguageModel, dict[str, Any], str]],
    readings: tuple[str, ...],
    trained_at: int,
    longest: int,
) -> list[Read]:
    """Return every run as it was trained, each followed by its other readings."""
    asked = {text: resolve(text, what="reading") for text in readings}
    found: list[Read] = []
    used: set[str] = set()
    for folder, (model, config, _) in zip(runs, loaded, strict=True):
        found.append((folder, model, config))
        for text, chosen in asked.items():
            if chosen.position != model.config.position:
                continue
            used.add(text)
            options = _filled(chosen, trained_at, longest)
            config_ = config | {"position_options": {**config["position_options"], **options}}
            found.append((folder, _read_with(model, options, text), config_))
    for text, chosen in asked.items():
        if text not in used:
            methods = ", ".join(sorted({config["position"] for _, config, _ in loaded}))
            raise ValueError(
                f"reading: expected a method of the runs ({methods}), got {chosen.name!r}"
            )
    names = [(label_of(config), config["seed"]) for _, _, config in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"reading: expected other options than those of the runs, got {name[0]} twice"
            )
    return found


def _filled(chosen: Chosen, trained_at: int, longest: int) -> dict[str, Any]:
    """Return the options of a reading; of a scaling also from which length to which one."""
    options = dict(chosen.options)
    if chosen.name == "rotary" and options.get("scaling", "none") != "none":
        options.setdefault("original_length", trained_at)
        if options["scaling"] != "dynamic_ntk":
            options.setdefault("factor", max(1.0, longest / options["original_length"]))
    return options


def _read_with(model: LanguageModel, options: dict[str, Any], text: str) -> LanguageModel:
    """Return the model with these options and its own weights."""
    own = {**model.config.position_options, **options}
    made = LanguageModel(replace(model.config, position_options=own))
    if next(model.parameters()).dtype == torch.float64:
        made.double()
    try:
        made.load_state_dict(model.state_dict())
    except RuntimeError as other:
        raise ValueError(
            f"reading: {text} must have the weights that the run was trained with; "
            f"{' '.join(str(other).split())}"
        ) from None
    return made.eval()
