"""How position enters a transformer: every method by name, one small interface.

  base.py          the interface: hooks at every place where position can enter
  sources.py       somebody's own class: run out of a file, and where it came from
  naming.py        what a person calls a method, and which class that is
  from_scoring.py  methods that are a function of the offset: any function of `tisa/scoring/`
  mixture.py       several methods, layer by layer
  published.py     weights that the authors of a method published, in our modules
  gates.py         what gates have in common: sums over tokens, scores of the key
  angles.py        what sinusoidal and rotary embeddings have in common
  rotary_scaling.py  rotary's rates for inputs longer than the training
  flow.py          the differential equation of FLOATER, solved

`METHODS` names the others, and which function of the offset a name stands for.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from tisa import scoring
from tisa.positions import naming
from tisa.positions.base import Layers, Places, Position, PositionConfig, Prepared, places_of
from tisa.positions.naming import Asked, Chosen, Given, Method, Told, canonical, described
from tisa.positions.sources import Source


def _of_offset(
    function: type[scoring.ScoringFunction],
    *,
    layers: Layers = "each",
    decoder: Mapping[str, Any] = MappingProxyType({}),
) -> Method:
    """Return the method that adds this function of the offset in every layer."""
    return naming.of_offset(function, defaults={"layers": layers}, decoder=decoder)


# The names, fixed here and nowhere else.
METHODS: dict[str, Method] = {
    "none": Method("none.py", "NoPosition"),
    "sinusoidal": Method("sinusoidal.py", "Sinusoidal"),
    "absolute": Method("absolute.py", "Absolute"),
    "shaw": Method("shaw.py", "Shaw"),
    # One table for all layers as published. T5 itself does not scale its logits; here all do.
    "t5": _of_offset(scoring.T5Buckets, layers="shared", decoder={"bidirectional": False}),
    "floater": Method("floater.py", "Floater"),
    "synthesizer-random": Method("synthesizer.py", "Synthesizer", {"form": "random"}),
    "synthesizer-factorised": Method("synthesizer.py", "Synthesizer", {"form": "factorised"}),
    "synthesizer-dense": Method("synthesizer.py", "Synthesizer", {"form": "dense"}),
    "synthesizer-random-mixed": Method(
        "synthesizer.py", "Synthesizer", {"form": "random", "mixed": True}
    ),
    "synthesizer-factorised-mixed": Method(
        "synthesizer.py", "Synthesizer", {"form": "factorised", "mixed": True}
    ),
    "synthesizer-dense-mixed": Method(
        "synthesizer.py", "Synthesizer", {"form": "dense", "mixed": True}
    ),
    # Its formula is one and the same in the paper and in the code.
    "tupe-a": Method("tupe.py", "Tupe", {"relative": False, "variant": "author"}),
    "tupe-r": Method("tupe.py", "Tupe", {"relative": True}),
    "rotary": Method("rotary.py", "Rotary"),
    # ALBERT passes through one layer many times: kernels for each pass here, one set for all
    # passes, the likelier reading of the paper, with `layers="shared"`.
    "tisa": _of_offset(scoring.TISA),
    "alibi": _of_offset(scoring.ALiBi, layers="shared"),
    # One function for all layers, as in the authors' code.
    "kerple-log": _of_offset(scoring.KerpleLog, layers="shared"),
    "kerple-power": _of_offset(scoring.KerplePower, layers="shared"),
    "tisa-v2": _of_offset(scoring.TISAv2),
    "near-far": _of_offset(scoring.NearFar),
    "fire": Method("fire.py", "Fire"),
    # Decoders only.
    "fox": Method("fox.py", "Fox"),
    "cable": Method("cable.py", "Cable"),
    "near-far-fox": Method("near_far_fox.py", "NearFarFox"),
}


def build_position(position: Asked, config: PositionConfig) -> Position:
    """Return a position method, with `config.options` as its keyword arguments.

    `position` is a name, a class, "my_file.py:Class", or several for the layers in turn, as in
    "rotary+none" (`tisa/positions/naming.py`); options that stand in a name go before those of the
    config.
    """
    return naming.build(resolve(position), config)


def resolve(position: Asked, *, what: str = "position") -> Chosen:
    """Return the method that a person asked for, a file of theirs being run; or say what is wrong.

    `what` is the argument that it was given as.
    """
    return naming.resolve(position, METHODS, what=what)


def recalled(
    name: str, told: Told | None, given: Asked | None = None, *, what: str = "position"
) -> Given:
    """Return what stands for the method that a saved model names, without running a file of it."""
    return naming.recalled(name, told, given, METHODS, what=what)


def register(name: str, cls: type[nn.Module]) -> None:
    """Make a class known by a name in this process, wherever a position method is named.

    tisa.register("mine", Mine)
    model = tisa.Transformer(tisa.TransformerConfig(position="mine"))

    The class is a `tisa.Position`, or a `tisa.ScoringFunction`, which becomes a position. A package
    that is installed can say the same for good: by an entry point of the group `tisa.positions`.
    """
    naming.register(name, cls, METHODS)


__all__ = [
    "METHODS",
    "Asked",
    "Chosen",
    "Given",
    "Method",
    "Places",
    "Position",
    "PositionConfig",
    "Prepared",
    "Source",
    "Told",
    "build_position",
    "canonical",
    "described",
    "places_of",
    "recalled",
    "register",
    "resolve",
]
