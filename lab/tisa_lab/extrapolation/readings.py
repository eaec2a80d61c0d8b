"""Trained models in, the same weights with other options of their position method out.

What a method can do at reading time alone: rotary at other rates (`scaling`, `p`), which needs no
training. In a mixture all layers of that method are read so.
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
            read = read_as(model, config, text, chosen, trained_at, longest)
            if read is not None:
                used.add(text)
                found.append((folder, *read))
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
                f"reading: expected other options than the runs have, got {name[0]} twice"
            )
    return found


def read_as(
    model: LanguageModel,
    config: dict[str, Any],
    text: str,
    chosen: Chosen,
    trained_at: int,
    longest: int,
) -> tuple[LanguageModel, dict[str, Any]] | None:
    """Return a model with the options of a reading, and its run's config with them.

    None where the reading is of another method. `text` is how it was asked for.
    """
    own = resolve(model.config.position)
    members = own.method.options.get("members", ())
    if chosen.position not in (own.position, *(member.position for member in members)):
        return None
    options = _filled(chosen, trained_at, longest)
    other: dict[str, Any] = {}
    told: dict[str, Any] = {}
    if members:
        other["position"] = told["position"] = "+".join(
            _with(member, options).label if member.position == chosen.position else member.label
            for member in members
        )
    else:
        # A model that was saved before a default changed has options that its run has not.
        other["position_options"] = {**model.config.position_options, **options}
        told["position_options"] = {**config["position_options"], **options}
    return _read_with(model, other, text), config | told


def _with(member: Chosen, options: dict[str, Any]) -> Chosen:
    return member._replace(options={**member.options, **options})


def _filled(chosen: Chosen, trained_at: int, longest: int) -> dict[str, Any]:
    """Return the options of a reading; of a scaling also from which length to which one."""
    options = dict(chosen.options)
    if chosen.name == "rotary" and options.get("scaling", "none") != "none":
        options.setdefault("original_length", trained_at)
        if options["scaling"] != "dynamic_ntk":
            options.setdefault("factor", max(1.0, longest / options["original_length"]))
    return options


def _read_with(model: LanguageModel, other: dict[str, Any], text: str) -> LanguageModel:
    """Return the model with these other values in its config, and its own weights."""
    made = LanguageModel(replace(model.config, **other))
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
