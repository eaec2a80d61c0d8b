"""Weights that the authors of a method published, in our modules."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from tisa.positions import METHODS, build_position
from tisa.positions.base import Position, PositionConfig
from tisa.shapes import Tensor


def from_reference(name: str, state_dict: Mapping[str, Tensor], config: PositionConfig) -> Position:
    """Return the position method of that name with the weights of its authors' checkpoint.

    `state_dict` is the checkpoint, or its part that belongs to one encoder or decoder: what has
    other names is left alone. `config` has the sizes of that model; where the authors' code is
    not what their paper says (`variant`), it is the code's.
    """
    with torch.device("meta"):
        cls = type(build_position(name, config))
    if "variant" in (METHODS[name].known(cls) or ()):
        config = replace(config, options={"variant": "author", **config.options})
    position = build_position(name, config)
    position.read_reference(state_dict)
    return position
